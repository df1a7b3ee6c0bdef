"""The body of an error, in the form that most endpoints have: OpenAI's."""

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """Says what went wrong, and which field is to blame."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail
