"""Read the tokenizer from the files of a folder, by the rules of transformers.

`tokenizer.json` holds a whole tokenizer. Three files next to it may declare more tokens, or that one of its tokens is
special:

    tokenizer_config.json     "eos_token", "pad_token", ...: a special token for each role
                              "extra_special_tokens" (older: "additional_special_tokens"): other special tokens
                              "added_tokens_decoder": tokens with their properties; if present, the next two files
                              are ignored
    special_tokens_map.json   the same roles, in older checkpoints
    added_tokens.json         {token: id}, in still older ones

A token that `tokenizer.json` lacks gets the next free id, even if a file gives another one. `tokenizer.json` alone
decides whether a text begins or ends with a special token: "add_bos_token", "add_eos_token" and "add_prefix_space" in
other files are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.errors import ModelError
from minipaged.models.json_files import read_json_if_there

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER, CONFIG, OLDER_CONFIG = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED = "added_tokens.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The roles that transformers defines for every tokenizer. Other roles end in "_token" too ("image_token")."""
EXTRA, ADDITIONAL = EXTRAS = ("extra_special_tokens", "additional_special_tokens")
PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer, with the special tokens that its files declare."""

    backend: Tokenizer
    """The tokenizer, with every declared token."""
    roles: dict[str, AddedToken]
    """The special tokens by role: "eos_token", ..."""
    untyped: frozenset[str] = field(default_factory=frozenset)
    """Roles whose token is an object without "__type", which transformers does not accept."""

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, or None if no file names one."""
        eos = self.roles.get("eos_token")
        return None if eos is None else self.backend.token_to_id(eos.content)


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer in `folder`. Raises ModelError if there is none or a file is damaged."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelError(f"{folder} holds no tokenizer.json; put the model's tokenizer.json there")
    files = (folder / name for name in (TOKENIZER, CONFIG, OLDER_CONFIG, ADDED))
    return _read(folder, tuple(file.read_bytes() if file.is_file() else b"" for file in files))


@lru_cache(maxsize=1)  # the model's configuration needs the end token first; a large file is read once for both
def _read(folder: Path, contents: tuple[bytes, ...]) -> TokenizerFiles:
    """Read the tokenizer in `folder`. `contents`, the contents of its files, is the cache's key."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{path} is damaged or of another format: {error}") from None
    config = read_json_if_there(folder / CONFIG)
    older = {} if "added_tokens_decoder" in config else read_json_if_there(folder / OLDER_CONFIG)
    padding = None if backend.padding is None else str(backend.padding["pad_token"])
    declared, extra, special = _declared(folder, config, older, padding)
    listed, by_content = _listed(folder, config, backend, special)
    for role in declared.keys() & set(ROLES):
        declared[role] = by_content.get(_special(declared[role]).content, declared[role])
    roles = {role: _special(token) for role, token in declared.items()}

    known = {each.content for each in (*backend.get_added_tokens_decoder().values(), *listed)}
    missing: list[str | AddedToken] = []
    for token in (*declared.values(), *extra):
        if _special(token).content not in known and token not in missing:
            missing.append(token)
    tokens = [*listed, *map(_special, missing)]
    named = {each.content for each in roles.values()}
    for token in tokens:
        token.special |= token.content in named
    backend.add_tokens(tokens)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    backend.no_truncation()
    backend.no_padding()
    untyped = {role for role in ROLES if isinstance(said := config.get(role), dict) and "__type" not in said}
    return TokenizerFiles(backend, roles, frozenset(untyped - older.keys()))


def _declared(
    folder: Path, config: Mapping[str, Any], older: Mapping[str, Any], padding: str | None
) -> tuple[dict[str, str | AddedToken], list[str | AddedToken], set[str]]:
    """The special tokens by role, those without a role, and the texts that are special if added_tokens.json lists them.

    A token written as a text stays a text, because transformers treats it differently from an object with that content.
    If both files name one of `ROLES`, the older file wins. `padding`: the token with which tokenizer.json pads.
    """
    roles: dict[str, str | AddedToken | None] = dict.fromkeys(ROLES)
    if padding is not None and "pad_token" not in {**config, **older}:
        roles["pad_token"] = padding
    others: dict[str, str | AddedToken] = {}
    plain: dict[str, str | AddedToken] = {}  # texts in the newer file come last, and override the others
    for file, said in ((CONFIG, config), (OLDER_CONFIG, older)):
        for key, value in said.items():
            where = f"{folder / file}: {key}"
            if file == OLDER_CONFIG and isinstance(value, dict) and key != EXTRA:
                value = value | {"special": True}
            if key in ROLES:
                roles[key] = None if value is None else _token(value, where)
            elif key.endswith("_token") and isinstance(value, str | dict):  # "add_bos_token" is a bool
                (plain if file == CONFIG and isinstance(value, str) else others)[key] = _token(value, where)

    # A list, or a dict of more roles. The older name counts if the newer one is empty.
    lists = {key: config[key] for key in EXTRAS if key in config}
    if not lists.get(EXTRA) and ADDITIONAL in lists:
        lists[EXTRA] = lists.pop(ADDITIONAL)
    for said in (lists, older):
        if isinstance(more := said.get(EXTRA), dict):
            plain |= {role: _token(value, f"{folder}: {EXTRA}") for role, value in more.items()}
            lists.pop(EXTRA, None)
    if isinstance(older.get(EXTRA), list):
        lists[EXTRA] = [*(lists.get(EXTRA) or ()), *older[EXTRA]]
    if ADDITIONAL in older:
        lists[ADDITIONAL] = older[ADDITIONAL]
    extra = [_token(value, f"{folder}: {EXTRA}") for value in lists.get(EXTRA, lists.get(ADDITIONAL)) or ()]
    present = {role: token for role, token in (roles | others | plain).items() if token is not None}
    written = {role for role in ROLES if role in older or isinstance(config.get(role), str)}
    special = {_special(present[role]).content for role in written & present.keys()}
    special |= {each for each in lists.get(EXTRA) or () if isinstance(each, str)}
    return present, extra, special


def _listed(
    folder: Path, config: Mapping[str, Any], backend: Tokenizer, special: set[str]
) -> tuple[list[AddedToken], dict[str, AddedToken]]:
    """The tokens listed with an id, in the order of the ids; and the tokens by content, including those whose id a
    later entry takes over. `special`: the texts that are special tokens if added_tokens.json lists them."""
    from tokenizers import AddedToken

    listed: list[tuple[int, AddedToken]] = []
    try:
        if "added_tokens_decoder" in config:
            for token_id, value in config["added_tokens_decoder"].items():
                listed.append((int(token_id), _special(_token(value, f"added_tokens_decoder[{token_id!r}]"))))
        else:
            for content, token_id in read_json_if_there(folder / ADDED).items():
                token = AddedToken(content, normalized=content not in special, special=content in special)
                listed.append((int(token_id), token))
            listed += backend.get_added_tokens_decoder().items()
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{folder}: the list of added tokens is damaged ({error})") from None
    by_id = dict(listed)
    return [by_id[token_id] for token_id in sorted(by_id)], {token.content: token for _, token in listed}


def _special(token: str | AddedToken) -> AddedToken:
    """The token as an AddedToken. A token written as a text is special."""
    from tokenizers import AddedToken

    return AddedToken(token, special=True) if isinstance(token, str) else token


def _token(value: Any, where: str) -> str | AddedToken:
    """The token in a file's `value`: a text, or an object with properties. Raises ModelError for any other value."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        properties = {key: value[key] for key in PROPERTIES if key in value}
        if all(isinstance(each, bool) for each in properties.values()):
            return AddedToken(value["content"], **properties)
    raise ModelError(f"{where} reads {value!r}; expected a token's text, or an object with its 'content'")
