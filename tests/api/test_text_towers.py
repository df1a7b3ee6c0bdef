"""The text part of a model that reads images, behind the server: it answers texts, and says that images are refused."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.api.conftest import serving
from tests.api.contract import CHAT, MESSAGES, RESPONSES, post
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import SMALL

URL = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, "messages", {"max_tokens": 3}, {"type": "image_url", "image_url": {"url": URL}}),
    (RESPONSES, "input", {"max_output_tokens": 3}, {"type": "input_image", "image_url": URL}),
    (MESSAGES, "messages", {"max_tokens": 3}, {"type": "image", "source": SOURCE}),
]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random checkpoint of a small model with a vision tower."""
    directory: Path = tmp_path_factory.mktemp("tower")
    vision = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {**SMALL, "max_position_embeddings": 512, "head_dim": 32, "rope_parameters": rope, "eos_token_id": 258}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}, tie_word_embeddings=False
    )
    model: Any = transformers.Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(directory)
    make_byte_tokenizer(directory)
    return str(directory)


async def test_an_image_is_refused_by_every_protocol_and_text_is_answered(tower: str) -> None:
    async with serving(model=tower) as server:
        for path, field, limit, image in IMAGES:
            kind = "input_text" if path == RESPONSES else "text"
            parts = [{"type": kind, "text": "What is this?"}, image]
            said = [{"role": "user", "content": parts}]
            reply = await post(server, path, {"model": "bundled", field: said, **limit}, 400)
            message = reply["error"]["message"]
            assert f"{field}.0.content.1: type '{image['type']}' is not supported" in message
            assert "because this server reads text only" in message
            said[0]["content"] = parts[:1]
            await post(server, path, {"model": "bundled", field: said, **limit})
        assert server.is_idle
