"""Several names for one model."""

import openai
import pytest

from chairlift.api import ServerConfig
from tests.api.conftest import client_of, serving


async def test_every_name_is_served_and_replies_have_the_first() -> None:
    config = ServerConfig.model_validate({"served_model_name": ["gpt-4o", "org/small", "gpt-4o"]})
    async with serving(config) as server, client_of(server) as client:
        assert [card.id async for card in client.models.list()] == ["gpt-4o", "org/small"]
        for name in ("gpt-4o", "org/small"):
            assert (await client.models.retrieve(name)).id == name
            reply = await client.completions.create(model=name, prompt="a", max_tokens=1)
            assert reply.model == "gpt-4o"
        with pytest.raises(
            openai.NotFoundError, match="there is no model 'bundled' here, only 'gpt-4o' or 'org/small'"
        ):
            await client.completions.create(model="bundled", prompt="a", max_tokens=1)


def test_one_name_need_not_be_a_list() -> None:
    assert ServerConfig.model_validate({"served_model_name": "mine"}).served_model_name == ["mine"]
