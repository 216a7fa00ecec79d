"""Blocks in a folder: what cannot be had whole is not there, and whatever happens to a file costs a computation."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minipaged.errors import InvalidRequest
from minipaged.handover import shared_storage
from minipaged.handover.block_hashes import salt_number, salted
from minipaged.handover.kv_connector import Handshake
from minipaged.handover.shared_storage import DIGEST_BYTES, SharedStorageConnector

HANDSHAKE = Handshake(
    model="0123456789abcdef",
    dtype="float32",
    kv_cache_dtype="auto",
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    block_bytes=1000,
)
TOKENS = list(range(100, 118))  # four blocks, and two tokens more
BLOCKS = {logical: bytes([logical]) * 1000 for logical in range(4)}

NAMES = [f"{name}.block" for name in ("25ea011ce945c24c", "1c8eff4b2bdc70ea", "84e4f55a4e12ebf8", "790497066e133cad")]
"""The names of their files, with CPython's hash of tuples."""
SEALS = ["dc64cbfd", "01aa7432", "14203527", "39d0fedc"]
"""The first bytes of these."""


def opened(folder: Path, *given: Any, **changed: Any) -> SharedStorageConnector:
    connector = SharedStorageConnector(folder, *given)
    connector.open(replace(HANDSHAKE, **changed))
    return connector


@pytest.fixture
def stored(tmp_path: Path) -> SharedStorageConnector:
    connector = opened(tmp_path / "kv")
    assert connector.store(TOKENS, BLOCKS) == [0, 1, 2, 3]
    return connector


def files(connector: SharedStorageConnector) -> list[Path]:
    """Of the four blocks, in their order."""
    return list(connector._paths(TOKENS, 0, 4))


def test_another_connector_has_what_one_has_stored(stored: SharedStorageConnector) -> None:
    other = opened(stored.folder)
    assert other.load(TOKENS, 0, 4) == list(BLOCKS.values())
    assert other.load(TOKENS, 1, 3) == [BLOCKS[1], BLOCKS[2]]
    assert other.load(TOKENS, 4, 4) == []
    assert other.lacking(TOKENS, 0, 4) == []


def test_only_the_same_tokens_find_it(stored: SharedStorageConnector) -> None:
    changed = [*TOKENS[:6], 0, *TOKENS[7:]]
    assert stored.load(changed, 0, 4) == [BLOCKS[0]]
    assert stored.lacking(changed, 0, 4) == [1, 2, 3]


def test_only_the_same_salt_finds_it(tmp_path: Path) -> None:
    mine, theirs = (salted(TOKENS, salt_number(salt)) for salt in ("mine", "theirs"))
    connector = opened(tmp_path)
    connector.store(mine, BLOCKS)
    for others in (TOKENS, theirs):
        assert connector.load(others, 0, 4) == []
        assert connector.load(others, 1, 4) == []
        assert connector.lacking(others, 0, 4) == [0, 1, 2, 3]
    assert opened(tmp_path).load(mine, 0, 4) == list(BLOCKS.values())
    assert opened(tmp_path).load(mine, 2, 4) == [BLOCKS[2], BLOCKS[3]]


def test_a_block_of_another_salt_under_its_name_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash is no proof: the seal has the salt too."""
    connector = opened(tmp_path)
    connector.store(salted(TOKENS, salt_number("mine")), BLOCKS)
    right = shared_storage.hash_blocks
    monkeypatch.setattr(  # every salt leads to the same files
        shared_storage,
        "hash_blocks",
        lambda tokens, *rest: right(salted(TOKENS, salt_number("mine")), *rest),
    )
    assert connector.load(TOKENS, 0, 4) == []


def test_the_files_of_blocks_without_a_salt_are_named_and_sealed_as_ever(stored: SharedStorageConnector) -> None:
    """Names of files are those of earlier versions, so a folder that one of them has filled is not lost."""
    assert [path.name for path in files(stored)] == NAMES
    assert [path.read_bytes()[:4].hex() for path in files(stored)] == SEALS


def test_roles(tmp_path: Path) -> None:
    """A consumer is offered nothing, a producer given nothing."""
    producer, consumer = opened(tmp_path, "kv_producer"), opened(tmp_path, "kv_consumer")
    assert consumer.lacking(TOKENS, 0, 4) == ()
    assert producer.lacking(TOKENS, 0, 4) == [0, 1, 2, 3]
    producer.store(TOKENS, BLOCKS)
    assert producer.load(TOKENS, 0, 4) == []
    assert len(consumer.load(TOKENS, 0, 4)) == 4
    with pytest.raises(InvalidRequest, match="role is 'reader'; choose 'kv_producer', 'kv_consumer' or 'kv_both'"):
        SharedStorageConnector(tmp_path, "reader")  # type: ignore[arg-type]


def test_it_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """As the settings of replicas are."""
    sent = pickle.loads(pickle.dumps(SharedStorageConnector(tmp_path, "kv_consumer", 7)))
    assert (sent.folder, sent.role, sent.max_bytes) == (tmp_path, "kv_consumer", 7)


# --- What can happen to files ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, DIGEST_BYTES, DIGEST_BYTES + 999, DIGEST_BYTES + 1001])
def test_a_block_that_was_cut_is_not_there(stored: SharedStorageConnector, length: int) -> None:
    """And is removed, so that it can be stored again."""
    path = files(stored)[1]
    path.write_bytes((path.read_bytes() + b"x")[:length])
    assert stored.load(TOKENS, 0, 4) == [BLOCKS[0]]
    assert stored.lacking(TOKENS, 0, 4) == [1]
    stored.store(TOKENS, {1: BLOCKS[1]})
    assert len(stored.load(TOKENS, 0, 4)) == 4


def test_a_block_with_a_wrong_byte_is_not_there(stored: SharedStorageConnector) -> None:
    path = files(stored)[2]
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    assert stored.load(TOKENS, 0, 4) == [BLOCKS[0], BLOCKS[1]]


def test_a_block_that_was_lost_ends_what_can_be_had(stored: SharedStorageConnector) -> None:
    files(stored)[1].unlink()
    assert stored.load(TOKENS, 0, 4) == [BLOCKS[0]]
    assert stored.load(TOKENS, 2, 4) == [BLOCKS[2], BLOCKS[3]]


def test_equal_hashes_of_other_tokens_are_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shared_storage,
        "hash_blocks",
        lambda tokens, size, start, stop, parent: ((logical, logical, ()) for logical in range(start, stop)),
    )
    connector = opened(tmp_path)
    connector.store(TOKENS, BLOCKS)
    assert connector.load([1, *TOKENS[1:]], 0, 4) == []
    connector.store(TOKENS, BLOCKS)
    assert connector.load([*TOKENS[:4], 1, *TOKENS[5:]], 2, 4) == []  # its own tokens are the same; those before differ


def test_blocks_of_another_model_that_took_the_folder_over_are_not_taken(stored: SharedStorageConnector) -> None:
    """While an engine runs, somebody empties the folder, and another model's engine comes."""
    for path in stored.folder.iterdir():
        path.unlink()
    opened(stored.folder, model="f" * 16).store(TOKENS, BLOCKS)
    assert stored.load(TOKENS, 0, 4) == []


def test_a_folder_that_is_gone_is_told_of_once_and_nothing_raises(
    stored: SharedStorageConnector, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in stored.folder.iterdir():
        path.unlink()
    stored.folder.rmdir()
    assert stored.load(TOKENS, 0, 4) == []
    assert stored.lacking(TOKENS, 0, 4) == [0, 1, 2, 3]
    assert stored.store(TOKENS, BLOCKS) == []
    assert stored.store(TOKENS, BLOCKS) == []
    told = capsys.readouterr().err
    assert told.count("blocks that cannot be handed over are computed") == 1
    assert str(stored.folder) in told


def test_a_file_that_cannot_be_read_is_computed_instead(
    stored: SharedStorageConnector, capsys: pytest.CaptureFixture[str]
) -> None:
    files(stored)[1].unlink()
    files(stored)[1].mkdir()
    assert stored.load(TOKENS, 0, 4) == [BLOCKS[0]]
    assert "blocks that cannot be handed over are computed" in capsys.readouterr().err


def test_a_folder_that_may_not_be_looked_into_is_done_without(
    stored: SharedStorageConnector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def utime(path: Path, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", utime)
    assert stored.lacking(TOKENS, 0, 4) == ()
    assert "Permission denied; blocks that cannot be handed over are computed" in capsys.readouterr().err


def test_a_disk_that_fails_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connector = opened(tmp_path)
    right, calls = os.replace, []

    def replace_until_full(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) > 2:
            raise OSError(5, "Input/output error")
        right(source, target)

    monkeypatch.setattr(os, "replace", replace_until_full)
    assert connector.store(TOKENS, BLOCKS) == [0, 1]
    assert "Input/output error" in capsys.readouterr().err
    assert connector.load(TOKENS, 0, 4) == [BLOCKS[0], BLOCKS[1]]
    assert not list(tmp_path.glob("*.partial"))


def test_only_the_handshake_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses power may leave the name of a file without content. A block is sealed against that."""
    calls: list[str] = []
    for name in ("fsync", "link", "replace"):
        right = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, right=right: (calls.append(name), right(*given)))
    opened(tmp_path).store(TOKENS, {0: BLOCKS[0]})
    assert calls == ["fsync", "link", "replace"]


def test_damaged_files_are_said_once(stored: SharedStorageConnector, capsys: pytest.CaptureFixture[str]) -> None:
    for path in files(stored):
        path.write_bytes(b"")
    for logical in range(4):
        assert stored.load(TOKENS, logical, logical + 1) == []
    assert capsys.readouterr().err.count("is cut, damaged or from elsewhere, and is removed") == 1


def test_one_visit_removes_all_damaged_files_of_a_prompt(stored: SharedStorageConnector) -> None:
    """All of them can be stored again."""
    for path in files(stored)[1:3]:
        path.write_bytes(b"")
    assert stored.load(TOKENS, 0, 4) == [BLOCKS[0]]
    assert stored.lacking(TOKENS, 0, 4) == [1, 2]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """One writes and removes, the other reads: what it finds is whole."""
    writer, reader = (opened(tmp_path, block_bytes=2_000_000) for _ in range(2))
    large = {0: b"a" * 2_000_000}
    [path] = writer._paths(TOKENS, 0, 1)
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            data = path.read_bytes() if path.exists() else b""
            seen.append(len(data))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(50):
            writer.store(TOKENS, large)
    finally:
        done.set()
        thread.join()
    assert {*seen} <= {0, DIGEST_BYTES + 2_000_000}
    assert reader.load(TOKENS, 0, 1) == [large[0]]


def test_a_huge_file_is_not_read_whole(stored: SharedStorageConnector, capsys: pytest.CaptureFixture[str]) -> None:
    """It has more bytes than there is memory."""
    os.truncate(files(stored)[1], 1 << 43)
    assert stored.load(TOKENS, 0, 4) == [BLOCKS[0]]
    assert stored.lacking(TOKENS, 0, 4) == [1]
    assert "is cut, damaged or from elsewhere, and is removed" in capsys.readouterr().err


def test_a_long_prompt_is_read_once(tmp_path: Path) -> None:
    """All tokens up to a block's end name and seal it; their blocks follow one from another."""

    class Counted(list[int]):
        taken = 0

        def __getitem__(self, index: Any) -> Any:
            self.taken += len(range(*index.indices(len(self))))
            return super().__getitem__(index)

    connector, tokens = opened(tmp_path), Counted(range(400))
    blocks = {logical: bytes([logical]) * 1000 for logical in range(100)}
    assert connector.store(tokens, blocks) == list(blocks)
    assert connector.load(tokens, 0, 100) == list(blocks.values())
    assert connector.load(tokens, 90, 100) == list(blocks.values())[90:]
    assert tokens.taken <= 2 * 3 * 400  # for names and seals, by each of the three
    missing = Counted(range(1, 401))
    assert connector.load(missing, 0, 100) == []
    assert missing.taken <= 2 * 4  # not looked at beyond the first block


def test_files_keep_their_names_and_seals(stored: SharedStorageConnector) -> None:
    """A folder outlives the engines that use it, and versions of this code."""
    assert [path.name for path in files(stored)] == [
        "25ea011ce945c24c.block",
        "1c8eff4b2bdc70ea.block",
        "84e4f55a4e12ebf8.block",
        "790497066e133cad.block",
    ]
    assert [path.read_bytes()[:DIGEST_BYTES].hex() for path in files(stored)] == [
        "dc64cbfd7e0155dffe059bb10346b4a8",
        "01aa743260f3c0f38404c80cb951c18f",
        "14203527a50f30479630cb75e2b45d34",
        "39d0fedc5d5858dde815c9e875a7fe25",
    ]
    assert json.loads((stored.folder / "handshake.json").read_text()).keys() == DIFFERENT.keys()


# --- Room -----------------------------------------------------------------------------------------


SIZE = DIGEST_BYTES + 1000


@pytest.mark.parametrize("room", [160, 165, 175])
def test_a_full_folder_is_scanned_once_for_every_sixteenth(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = opened(tmp_path, "kv_both", room * SIZE)
    for number in range(room):
        connector.store([number] * 4, {0: bytes(1000)})
    scans, right = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: (scans.append(folder), right(folder))[1])
    for number in range(room, room + 160):
        connector.store([number] * 4, {0: bytes(1000)})
        assert 15 * room // 16 <= len(os.listdir(tmp_path)) - 1 <= room
    assert 13 <= len(scans) <= 17


def test_what_is_left_of_a_chain_can_be_found(tmp_path: Path) -> None:
    """Stored from its end on, as a floor drops it; found; then room for four of its blocks is made."""
    for way in ("store", "load", "lacking"):
        connector = opened(tmp_path / way, "kv_both", 65 * SIZE)
        chain, logicals = list(range(4 * 64)), list(range(64))
        if way == "store":
            connector.store(chain, {logical: bytes(1000) for logical in logicals})
        else:
            for logical in reversed(logicals):
                connector.store(chain, {logical: bytes(1000)})
        if way == "load":
            assert len(connector.load(chain, 0, 64)) == 64
        if way == "lacking":
            assert connector.lacking(chain, 0, 64) == []
        others = 0
        while len(list(connector.folder.glob("*.block"))) - others > 60:
            connector.store([1000 + others] * 4, {0: bytes(1000)})
            others += 1
        left = len(list(connector.folder.glob("*.block"))) - others
        assert len(connector.load(chain, 0, 64)) == left > 50, way


def test_a_block_that_is_offered_again_counts_as_used(tmp_path: Path) -> None:
    connector = opened(tmp_path, "kv_both", 2 * SIZE)
    first, second, third = ([number] * 4 for number in range(3))
    connector.store(first, {0: BLOCKS[0]})
    connector.store(second, {0: BLOCKS[1]})
    assert connector.lacking(first, 0, 1) == []
    connector.store(third, {0: BLOCKS[2]})
    assert connector.lacking(second, 0, 1) == [0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_file_system_that_is_full_before_the_folder_gets_room(
    stored: SharedStorageConnector, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has room for four blocks, of the many that the folder may hold."""
    right = os.replace

    def replace(source: str, target: Path) -> None:
        if sum(path.stat().st_size for path in stored.folder.glob("*.block")) > 3 * SIZE:
            raise OSError(code, "No space left on device")
        right(source, target)

    monkeypatch.setattr(os, "replace", replace)
    for number in range(20):
        assert stored.store([number] * 4, {0: bytes([number]) * 1000}) == [0]
        assert stored.load([number] * 4, 0, 1) == [bytes([number]) * 1000]
    assert len(list(stored.folder.glob("*.block"))) > 2
    assert not capsys.readouterr().err


def test_a_file_system_that_others_have_filled_is_said_once(
    stored: SharedStorageConnector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replace(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    for number in range(3):
        assert stored.store([number] * 4, {0: bytes(1000)}) == []
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert not list(stored.folder.glob("*.partial"))


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    connector = opened(tmp_path, "kv_both", 4 * (DIGEST_BYTES + 1000))
    connector.store(TOKENS, BLOCKS)
    for age, path in enumerate(files(connector)):
        os.utime(path, ns=(age, age))
    assert len(connector.load(TOKENS, 0, 1)) == 1  # now it was used last
    others = [7] * 8
    connector.store(others, {0: b"b" * 1000, 1: b"c" * 1000})
    assert connector.load(TOKENS, 0, 1) == [BLOCKS[0]]
    assert connector.lacking(TOKENS, 0, 4) == [1, 2]
    assert connector.lacking(others, 0, 2) == []


def test_the_folder_stays_within_its_bound_whoever_writes(tmp_path: Path) -> None:
    """Two engines that know of each other only by looking now and then."""
    most = 40 * (DIGEST_BYTES + 1000)
    two = [opened(tmp_path, "kv_both", most) for _ in range(2)]
    for number in range(200):
        two[number % 2].store([number] * 4, {0: bytes(1000)})
        assert sum(path.stat().st_size for path in tmp_path.glob("*.block")) <= most * 9 / 8
    assert len(list(tmp_path.glob("*.block"))) > 30


def test_what_a_writer_left_that_died_is_removed_like_a_block(tmp_path: Path) -> None:
    connector = opened(tmp_path, "kv_both", 4 * (DIGEST_BYTES + 1000))
    left = tmp_path / "abc.partial"
    left.write_bytes(bytes(500))
    os.utime(left, ns=(1, 1))
    connector.store(TOKENS, BLOCKS)
    assert not left.exists()


# --- The handshake --------------------------------------------------------------------------------

DIFFERENT = {
    "model": "fedcba9876543210",
    "dtype": "bfloat16",
    "kv_cache_dtype": "int8",
    "num_layers": 3,
    "num_kv_heads": 1,
    "head_dim": 16,
    "block_size": 8,
}


def test_everything_in_the_handshake_can_differ() -> None:
    """But for the size of a block, which follows from the rest."""
    assert DIFFERENT.keys() == {*Handshake.__dataclass_fields__} - {"block_bytes"} == HANDSHAKE.compared().keys()


@pytest.mark.parametrize("name", DIFFERENT)
def test_an_engine_that_does_not_fit_is_told_both_values(stored: SharedStorageConnector, name: str) -> None:
    here, there = DIFFERENT[name], getattr(HANDSHAKE, name)
    with pytest.raises(InvalidRequest, match=f"blocks of another kind: {name} is {there!r} there and {here!r} here;"):
        opened(stored.folder, **{name: here})
    assert opened(stored.folder).load(TOKENS, 0, 4) == list(BLOCKS.values())  # nothing was harmed


def test_a_folder_that_cannot_be_had_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file cannot be used: .*; give another folder"):
        opened(tmp_path / "file")
    for damaged in ("{", "[]", "null"):
        (tmp_path / "handshake.json").write_text(damaged)
        with pytest.raises(InvalidRequest, match=r"handshake\.json is damaged; remove"):
            opened(tmp_path)
    (tmp_path / "handshake.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="blocks of another kind: model is None there"):
        opened(tmp_path)
    with pytest.raises(InvalidRequest, match="the folder is ''; name one"):
        SharedStorageConnector("")


def test_a_folder_that_could_not_be_made_is_said_by_a_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"file/kv cannot be used: .*; give another folder"):
        SharedStorageConnector(tmp_path / "file" / "kv").check(HANDSHAKE)


def test_to_check_leaves_a_folder_to_everybody(tmp_path: Path) -> None:
    SharedStorageConnector(tmp_path / "some" / "kv").check(HANDSHAKE)
    assert list(tmp_path.iterdir()) == [], "not even the folder is there"
    opened(tmp_path / "kv", block_size=8)
    with pytest.raises(InvalidRequest, match="block_size is 8 there and 4 here"):
        SharedStorageConnector(tmp_path / "kv").check(HANDSHAKE)


def test_of_many_that_open_a_new_folder_at_once_all_agree(tmp_path: Path) -> None:
    errors: list[Exception] = []
    barrier = threading.Barrier(8)

    def open_one(number: int) -> None:
        barrier.wait()
        try:
            opened(tmp_path / "kv", num_layers=number % 2 + 1)
        except InvalidRequest as error:
            errors.append(error)

    threads = [threading.Thread(target=open_one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4  # those that were not of the first one's kind
    assert json.loads((tmp_path / "kv" / "handshake.json").read_text())["num_layers"] in (1, 2)


def test_the_folder_is_its_owners_alone(stored: SharedStorageConnector) -> None:
    """Prompts can be told from keys and values."""
    assert stored.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in stored.folder.iterdir()} == {0}


def test_files_of_others_are_let_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("thesis.txt", "keep.json"):
        (tmp_path / name).write_bytes(bytes(3000))
    (tmp_path / "folder").mkdir()
    stored = opened(tmp_path, "kv_both", 300, block_bytes=100)
    for i in range(10):
        stored.store([i, i + 1, i + 2, i + 3], {0: bytes(100)})
    there = {path.name for path in tmp_path.iterdir()}
    assert {"thesis.txt", "keep.json", "folder"} < there
    assert 1 <= sum(name.endswith(".block") for name in there) <= 3


@pytest.mark.parametrize("value", [0, -1, True, "4G", None, 1.5])
def test_a_limit_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"max_bytes is .* it must be a whole number of bytes, 1 or more"):
        SharedStorageConnector("somewhere", max_bytes=value)


def test_a_limit_below_the_size_of_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"max_bytes allows 1,015 bytes, and one block takes 1,016; allow more"):
        opened(tmp_path / "kv", "kv_both", 1015)
    assert not list(tmp_path.iterdir())
    one = opened(tmp_path / "kv", "kv_both", 1016)
    assert one.store(TOKENS, {0: BLOCKS[0]}) == [0]
    assert one.store([1, 2, 3, 4], {0: BLOCKS[1]}) == [0]
    assert one.load(TOKENS, 0, 1) == []
    assert one.load([1, 2, 3, 4], 0, 1) == [BLOCKS[1]]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidRequest, match=r"others may write to .*give a folder of your own, such as .*/kv"):
        opened(tmp_path)
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o700)
    opened(tmp_path)
