"""What a server says of itself is what it does: a sequence may be as long as it says, and no longer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.async_llm import AsyncLLM
from minipaged.errors import InvalidRequest
from minipaged.llm import LoadedModel
from minipaged.serve.app import create_app
from minipaged.serve.serving import LocalModel
from tests.serve.harness import PATIENCE_S, run


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4, 16]),
    asked=st.none() | st.integers(1, 60),
    data=st.data(),
)
def test_a_sequence_may_be_as_long_as_is_said_and_no_longer(
    tiny: LoadedModel, num_blocks: int, block_size: int, asked: int | None, data: st.DataObject
) -> None:
    room = num_blocks * block_size
    settings: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": asked}
    if asked is not None and asked > room:
        with pytest.raises(InvalidRequest, match=rf"max_model_len is {asked}, .* lower max_model_len to {room} or"):
            AsyncLLM(tiny, **settings)
        return

    async def work() -> None:
        allm = AsyncLLM(tiny, **settings)
        transport = httpx.ASGITransport(create_app(LocalModel(allm, ["tiny"])))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            [card] = (await client.get("/v1/models")).json()["data"]
            longest = card["max_model_len"]
            assert longest == (room if asked is None else asked)
            told = await client.post("/tokenize", json={"prompt": "x"})
            assert told.json()["max_model_len"] == longest
            if longest > 1:
                length = data.draw(st.integers(1, longest - 1))
                body = {"prompt": [70] * length, "max_tokens": longest - length, "ignore_eos": True}
                for asked_for in (longest - length, longest):  # what is beyond the room is lowered to it
                    answer = await client.post("/v1/completions", json=body | {"max_tokens": asked_for})
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["total_tokens"] == longest
                for more in ({"max_tokens": longest + 1}, {"prompt": [70] * longest, "max_tokens": 1}):
                    error = (await client.post("/v1/completions", json=body | more)).json()["error"]
                    assert error["code"] == "context_length_exceeded"
                    assert f"maximum context length is {longest} tokens" in error["message"]
        await asyncio.wait_for(allm.shutdown(), PATIENCE_S)

    run(work)
