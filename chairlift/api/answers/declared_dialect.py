"""Reads answers, and refuses requests, where the served model's format is declared."""

from collections.abc import Sequence

from chairlift.api.answers import gemma_calls
from chairlift.api.answers.declared import Declared
from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.structure import AnswerOptions, WantedStructure
from chairlift.api.answers.thoughts import THOUGHT_MARKS
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import InvalidRequest

_TAIL_SIZES = (64, 1024)  # tokens at the end of a prompt in which the answer's beginning is looked for
_WHY = "this model's format of calls is declared by a response template, for which there is no grammar"


class DeclaredDialect:
    """The format that a response template declares."""

    def __init__(self, form: Declared, tokenizer: Tokenizer, may_read_thoughts: bool) -> None:
        """`may_read_thoughts`: false if the settings say how thoughts are marked."""
        self.form = form
        self.is_enforced = form.has_calls and form.reads(gemma_calls.SAMPLE, *gemma_calls.SAMPLE_CALL)
        self._tokenizer = tokenizer
        added = tokenizer.describe()["added_tokens_decoder"].values()
        self._special_tokens = [token["content"] for token in added if token["special"]]
        self.thought_marks = form.thought_marks if may_read_thoughts else None
        # Marks that are known and tokens are read where an answer begins only, so that it can mention them later.
        is_known = self.thought_marks in THOUGHT_MARKS.values()
        is_known = is_known and None not in map(tokenizer.backend.token_to_id, self.thought_marks or ())
        self.reads_thoughts = may_read_thoughts and form.has_thoughts and not is_known

    def check(self, body: AnswerOptions, wanted: WantedStructure | None) -> None:
        """InvalidRequest if a request with tools asks for what only a grammar could ensure."""
        if body.call_mode == "required":
            raise InvalidRequest(f'tool_choice: calls cannot be required, because {_WHY}; set "auto"', "tool_choice")
        if wanted is not None:
            what = f"with tools, {wanted.field} is not supported here, because {_WHY}"
            raise InvalidRequest(f'{what}; leave one of them out, or set tool_choice to "none"', wanted.field)

    def warnings(self, functions: Sequence[FunctionSpec]) -> list[str]:
        """Returns what a client should know of an answer that may call these functions."""
        may_be_enforced = self.form.has_calls and not self.is_enforced
        enforced = [function for function in functions if function.is_enforced and may_be_enforced]
        kinds = sorted({"the grammar of custom tools" if each.is_custom else "strict" for each in enforced})
        return [f"{kind} was left out: {_WHY}" for kind in kinds]

    def format_after(
        self, prompt: Sequence[int], has_functions: bool, is_continued: bool
    ) -> tuple[Declared | None, tuple[str, ...]]:
        """The format of the answer to this prompt, and the special tokens to show in its text; None: text is text."""
        form = self.form.reading(calls=has_functions, thoughts=self.reads_thoughts)
        if form.is_plain:
            return None, ()
        sizes = (*_TAIL_SIZES, len(prompt)) if is_continued else _TAIL_SIZES
        texts = (self._tokenizer.decode(prompt[-size:], skip_special_tokens=False) for size in sizes)
        begun = next((found for text in texts if (found := form.after(text)) is not None), form)
        return begun, form.marks_among(self._special_tokens)
