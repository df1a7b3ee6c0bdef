"""`/v1/embeddings`: the request, its reply, and the job that it becomes."""

from base64 import b64encode
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from chairlift.api.http.access import Client
from chairlift.api.jobs import Job, JobMaker
from chairlift.api.replies.reply import UnstreamedReply
from chairlift.api.routes import Route, generating
from chairlift.api.wire.body import Label, Texts, TokenIds, WholeReply, let_others_run
from chairlift.api.wire.generation import SENDER
from chairlift.api.wire.marks import Idle
from chairlift.api.wire.scheduling import ScheduledRequest
from chairlift.api.wire.usage import PromptUsage
from chairlift.engine.text.deltas import RequestDelta
from chairlift.engine.text.embedding import Vector, vector_of
from chairlift.errors import InvalidRequest

_FORMS = "input must be a string, a list of strings, a list of token ids or a list of lists of them"


class EmbeddingRequest(ScheduledRequest):
    """Make a vector of a text, or of several."""

    input: str | Texts | TokenIds | list[TokenIds] = Field(
        description="a string, a list of strings, a list of token ids or a list of lists of them"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: a list of numbers (default); base64: float32 numbers, the lowest byte first"
    )
    dimensions: StrictInt | None = Field(
        None, ge=1, description="only so many of the vector's first numbers; for models that were trained so"
    )
    user: Label | None = Field(None, description=SENDER)
    prompt_name: str | None = Field(
        None, max_length=256, description="which of the checkpoint's prompts precedes each text; token ids get none"
    )
    normalize: StrictBool | None = Field(None, description="vectors of length one (default: true)")
    truncate_prompt_tokens: StrictInt | None = Field(None, ge=-1)
    add_special_tokens: Annotated[StrictBool | None, Idle("send token ids to have none added", (True,))] = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _say_what_an_input_is(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """One error about all four forms, where pydantic would name only the first."""
        try:
            given = handler(value)
        except ValidationError as error:
            raise InvalidRequest(_FORMS, "input") from error
        if given == []:
            raise InvalidRequest("input is empty; give at least one text", "input")
        return given

    @property
    def sender(self) -> str:
        return self.user or ""

    def inputs(self) -> list[str | list[int]]:
        """The texts, or their tokens."""
        if isinstance(self.input, str):
            return [self.input]
        return [list(self.input)] if isinstance(self.input[0], int) else list(self.input)


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[list[float] | str, PlainSerializer(let_others_run, return_type=list[float] | str)]


class EmbeddingList(WholeReply):
    """The vectors, in the order of the input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage

    @property
    def parts(self) -> list[Any]:
        """See `WholeReply`."""
        return self.data


class EmbeddingReply(UnstreamedReply):
    """One reply to one request."""

    def __init__(self, body: EmbeddingRequest, model: str) -> None:
        self.id = f"embd-{uuid4().hex}"
        self._model = model
        self._dimensions, self._is_normalized = body.dimensions, body.normalize is not False
        self._is_packed = body.encoding_format == "base64"

    def whole(self, outputs: list[RequestDelta]) -> EmbeddingList:
        """See `Reply`."""
        vectors = []
        for output in outputs:
            output.check_result()
            vectors.append(vector_of(output.prompt_result, self._dimensions, is_normalized=self._is_normalized))
        data = [Embedding(index=index, embedding=self._told(vector)) for index, vector in enumerate(vectors)]
        return EmbeddingList(data=data, model=self._model, usage=PromptUsage.of(outputs))

    def _told(self, vector: Vector) -> list[float] | str:
        return b64encode(vector.astype("<f4").tobytes()).decode() if self._is_packed else vector.tolist()


def _read(jobs: JobMaker, body: EmbeddingRequest, client: Client) -> Job:
    embedding = jobs.inputs.embedding
    given = body.inputs()
    return jobs.of_prompts(
        body,
        client,
        [embedding.with_prompt(each, body.prompt_name) if isinstance(each, str) else each for each in given],
        embedding.task,
        lambda: EmbeddingReply(body, jobs.model_name),
        prompt_field="input",
        truncate_to=body.truncate_prompt_tokens,
    )


EMBEDDING_ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        "embeddings",
        "Make vectors of texts",
        generating(EmbeddingRequest, _read),
        EmbeddingList,
        EmbeddingRequest,
    ),
)
