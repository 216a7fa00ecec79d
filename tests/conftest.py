"""What tests of every kind may ask for, where the Triton kernels run, and what a run says at its end."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which nothing has done yet

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; programs under test get Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

from minipaged.errors import ModelError
from tests import effort  # registers the profiles
from tests.durations import Measuring
from tests.left_running import LeftRunning
from tests.memory import give_back
from tests.progress import Progress
from tests.tiny_model import make_tiny_model
from tests.triton_interpreter import skip_idle_work

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

    from tests.browser import Tabs, Watched


settings.load_profile("quick")  # unless --hypothesis-profile names another


def pytest_configure(config: pytest.Config) -> None:
    """Each test process measures what tests cost; the one that people see says it."""
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        gc.disable()  # until the first test: the imports make half a million objects, and nearly all of them stay
        config.pluginmanager.register(Measuring(), "measuring")
        config.pluginmanager.register(LeftRunning())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Where the kernels run, and how many examples are tried."""
    triton = "in the interpreter, there is no GPU (float32, float16); compiled for GPUs, but not run"
    if torch.cuda.is_available():
        triton = f"compiled, on {torch.cuda.get_device_name()} (float32, float16, bfloat16)"
    profile, seed = settings.get_current_profile_name(), config.getoption("--hypothesis-seed")
    examples = f"{settings.default.max_examples} of {effort.ALL}, {'always the same' if seed is None else f'{seed=}'}"
    return [f"Triton kernels: {triton}", f"random examples: {examples} (profile {profile})"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before `-m` chooses. Tests of the real model go first: there is little else in memory, and they are long."""
    if left_out := effort.choose(items, config.getoption("--hypothesis-seed")):
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("model") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a test of the real model let go of is given back before another is loaded."""
    ran = yield
    if item.get_closest_marker("model"):
        give_back()
    return ran


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> Iterator[None]:
    """Python's garbage collector passes over what is there before the first test: it would find half a million objects,
    at every LLM that begins and many a time between. Each LLM asks how many are frozen, and counting them takes 0.03 s.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    frozen = gc.get_freeze_count()
    with patch.object(gc, "get_freeze_count", lambda: frozen):
        yield


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """OMP_NUM_THREADS holds for tests that call numba's kernels themselves, too.

    Left alone, numba starts a thread for each core and gives torch as many, and two test processes wait for each other.
    """
    from minipaged.fast.cpu.threads import use_threads

    use_threads()


@pytest.fixture(scope="session", autouse=True)
def _small_scratch() -> Iterator[None]:
    """Each LLM of the fast tier copies blocks to see how long it takes. A few do here: 256 are most of what it costs to
    make a small LLM, and take 100 MB beside the weights of a real one."""
    from minipaged.fast import preemption

    with patch.object(preemption, "SCRATCH_BLOCKS", 4):
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Test processes that share a machine share what numba compiles, too."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        from tests.compile_numba import compile_in_turns

        compile_in_turns(tmp_path_factory.getbasetemp().parent, int(worker.removeprefix("gw")))


@pytest.fixture(scope="session", autouse=True)
def _fetched(request: pytest.FixtureRequest) -> None:
    """The real model is here before the first test that needs it: fetching it takes 7 s and is no test's own work."""
    if any(item.get_closest_marker("model") for item in request.session.items):
        from minipaged.models.hub import resolve

        with suppress(ModelError):  # which those tests will tell of
            resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session", autouse=True)
def _compiling(pytestconfig: pytest.Config) -> Iterator[None]:
    """What numba compiles stands by itself among the costs of a run."""
    from numba.core.event import install_listener

    from tests.compile_numba import Compiling

    with install_listener("numba:compile", Compiling(pytestconfig.pluginmanager.get_plugin("measuring"))):
        yield


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton") is not None:
        skip_idle_work()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with random weights that runs in milliseconds."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    from playwright.sync_api import sync_playwright  # it is not everywhere where tests run

    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    from tests.browser import chromium

    with closing(chromium(playwright)) as browser:
        yield browser


@pytest.fixture(scope="session")
def tabs() -> Tabs:
    """The tabs that tests use one after the other."""
    from tests.browser import Tabs

    return Tabs()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """Chromium, or a skipped test."""
    return chromium


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """A page that complains of nothing in the whole test, and asks for nothing."""
    from tests.browser import watching

    with watching(browser) as watched:
        yield watched


@pytest.fixture(scope="session")
def python_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts that bring Python into a page, or a skipped test."""
    from docs import npm, python_in_page
    from tests.browser import missing

    folder = tmp_path_factory.mktemp("python")
    try:
        python_in_page.write(folder)
        python_in_page.write_grading(folder)
    except npm.NotFetched as error:
        missing(str(error))
    return folder


@pytest.fixture(autouse=True)
def the_loop_of_the_browser_is_not_everybodys(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once a test has asked for a browser, Playwright's loop counts as running in the main thread, and no other one
    could run there."""
    loop = None if {"browser", "chromium"} & {*request.fixturenames} else asyncio._get_running_loop()
    if loop is None:
        yield
        return
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(loop)
