"""A model behind a server that has `/tokenize` and tells `prompt_logprobs` of completions, as vLLM and Chairlift do."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from chairlift.compare.divergence import Told
from chairlift.errors import ConfigurationError
from chairlift.reachability import unreachable

_TIMEOUT_S = 600.0
_SHOWN = 200  # characters of an error's body
_NEEDED = "; only servers with /tokenize and prompt_logprobs, such as vLLM's and Chairlift's, can be compared"


class Server:
    """A `Side` behind HTTP. ConfigurationError if the server cannot be reached, or cannot do what is needed."""

    def __init__(self, url: str, top: int, model: str | None = None, api_key: str | None = None) -> None:
        self.name = url
        self._url = url.rstrip("/").removesuffix("/v1")
        self._top = top
        self._runner = asyncio.Runner()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = self._runner.run(_open(headers))
        try:
            self._model = model or self._first_model()
            self._check_abilities()
        except BaseException:
            self.close()
            raise

    def tokenize(self, text: str) -> list[int]:
        """See `Side`."""
        return self._tokenize(text, add_special_tokens=False)

    def beginning(self) -> int | None:
        """See `Side`."""
        special = self._tokenize("a", add_special_tokens=True)
        return special[0] if special[0] != self.tokenize("a")[0] else None

    def score(self, token_ids: Sequence[int], first: int) -> Told:
        """See `Side`."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._top}
        reply = self._post("/v1/completions", {"model": self._model, **body})
        told = _found(reply, "choices", 0, "prompt_logprobs")
        if not isinstance(told, list) or len(told) != len(token_ids):
            raise ConfigurationError(f"{self.name} tells no log-probabilities of prompts")
        return Told(
            [{int(token): each["logprob"] for token, each in position.items()} for position in told[first + 1 :]]
        )

    def close(self) -> None:
        """Closes the connection."""
        self._runner.run(self._http.close())
        self._runner.close()

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": add_special_tokens}
        tokens = _found(self._post("/tokenize", body), "tokens")
        if not isinstance(tokens, list) or (text and not tokens):
            raise ConfigurationError(f"{self.name} makes no tokens of a prompt at /tokenize")
        return tokens

    def _first_model(self) -> str:
        name = _found(self._get("/v1/models"), "data", 0, "id")
        if not isinstance(name, str):
            raise ConfigurationError(f"{self.name} names no model at /v1/models; write url={self.name},model=NAME")
        return name

    def _check_abilities(self) -> None:
        """Asks for what is needed, of one letter, so that a server without it is refused at once."""
        try:
            self.score((self.tokenize("a") * 2)[:2], 0)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{_NEEDED}") from error

    def _get(self, path: str) -> dict[str, Any]:
        return self._runner.run(self._request("GET", path, None))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._runner.run(self._request("POST", path, body))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            async with self._http.request(method, self._url + path, json=body) as response:
                if response.status != 200:
                    text = " ".join((await response.text()).split())[:_SHOWN]
                    raise ConfigurationError(f"{self.name} answered {path} with status {response.status}: {text}")
                reply: dict[str, Any] = await response.json()
                return reply
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise unreachable(self.name, error) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ConfigurationError(f"{self.name} cannot be used: {error or type(error).__name__}") from error


async def _open(headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))


def _found(reply: Any, *keys: str | int) -> Any:
    """Finds what a reply has in these places, one in the other; None if it has not."""
    for key in keys:
        try:
            reply = reply[key]
        except (IndexError, KeyError, TypeError):
            return None
    return reply
