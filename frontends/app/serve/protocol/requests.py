"""Requests for chats, completions and embeddings."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StrictInt, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from weft.backends.runtime.core.sampler import Sampling
from weft.ir.errors import WeftError
from weft.ir.storage.documents import parse_json

from .errors import bad_request
from .fields import Count, Items, RequestObject, Text, Texts, allow_only, choose_type, field_error
from .tools import ToolChoice

MAX_CHOICES, MAX_TOOLS = 128, 128
MAX_INPUTS = 2048  # of a request for embeddings, as in OpenAI's API
MAX_VALUES = 1_000_000  # in a body
ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]
_OBJECT = {"type": "object"}


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a request body; raise ApiError for any other body."""
    try:
        body: dict[str, Any] = parse_json(raw, "the body of the request", values=MAX_VALUES)
    except WeftError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}", None, None) from None
    return body


class ConstraintSpec(NamedTuple):
    """A constraint on answers: its `kind`, its value, and the request parameter that states it."""

    kind: ConstraintKind
    value: Any
    param: str


class StreamOptions(RequestObject, extra="forbid"):
    """OpenAI's stream_options; `include_usage` adds a last chunk with token counts."""

    include_usage: bool = False
    include_obfuscation: Any = None


class JsonSchema(RequestObject):
    """A JSON schema and its name."""

    name: str
    content: dict[str, Any] = Field(_OBJECT, alias="schema")


class ResponseFormat(RequestObject, extra="forbid"):
    """OpenAI's response_format: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type != "json_schema":
            self.json_schema = None
        elif self.json_schema is None:
            raise field_error("json_schema", "missing")
        return self


class StructuredOutputs(RequestObject, extra="forbid"):
    """vLLM's structured_outputs: at most one constraint on the answer."""

    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[Items[Text], Field(min_length=1)] | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False


Logprobs = Annotated[int, Field(ge=0, le=20)]
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(int)]
Bias = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-100, le=100)]
_BIASES = TypeAdapter(dict[Token, Bias])


class GenerationRequest(RequestObject, extra="forbid"):
    """A request for generated answers, with log-probabilities of the `top_logprobs` most likely tokens if given."""

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Texts = Field([], max_length=4)
    max_tokens: Count | None = None
    top_logprobs: Logprobs | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda p: max(p, 1e-9))] = 1.0  # 0: the most likely token
    top_k: Annotated[int, Field(ge=-1, le=1 << 31), AfterValidator(lambda k: max(k, 0))] = 0  # -1 is off, like 0
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Any], Field(max_length=300), AfterValidator(_BIASES.validate_python)] = Field({})
    seed: Annotated[int, AfterValidator(lambda seed: seed % (1 << 63))] | None = None  # negative seeds are allowed
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs = StructuredOutputs()

    @cached_property
    def sampling(self) -> Sampling:
        """Return the sampling options."""
        return Sampling(**{option.name: getattr(self, option.name) for option in fields(Sampling)})

    @cached_property
    def constraint(self) -> ConstraintSpec | None:
        """Return the constraint on answers, None without one; raise ApiError if the request has several."""
        form, outputs = self.response_format, self.structured_outputs
        specs: list[tuple[ConstraintKind, Any, str]] = [
            ("json_schema", _OBJECT if form.type == "json_object" else None, "response_format"),
            ("json_schema", form.json_schema and form.json_schema.content, "response_format.json_schema.schema"),
            ("regex", outputs.regex, "structured_outputs.regex"),
            ("grammar", outputs.grammar, "structured_outputs.grammar"),
            ("choice", outputs.choice, "structured_outputs.choice"),
            ("json_schema", outputs.json_schema, "structured_outputs.json"),
            ("json_schema", _OBJECT if outputs.json_object else None, "structured_outputs.json_object"),
        ]
        given_specs = [ConstraintSpec(*spec) for spec in specs if spec[1] is not None]
        if len(given_specs) > 1:
            params = " and ".join(spec.param for spec in given_specs)
            raise bad_request(f"Only one constraint is possible, but the request has {params}.", given_specs[1].param)
        return given_specs[0] if given_specs else None

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is enabled.", "stream_options")
        _ = self.constraint  # raises an error if there are several
        return self


def _parse_arguments(arguments: str) -> Any:
    """Return the parsed JSON of a call's arguments, or the string itself if a model has written invalid JSON."""
    try:
        return parse_json(arguments, "arguments", values=MAX_VALUES)
    except WeftError:
        return arguments


class Function(RequestObject):
    """The function of a tool (with its parameters) or of a call (with its arguments)."""

    name: str
    parameters: dict[str, Any] | None = None
    arguments: Annotated[str, AfterValidator(_parse_arguments)] = Field("{}", validate_default=True)


class Tool(RequestObject):
    """A tool, the choice of a tool, or a tool call (with its id)."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function

    @classmethod
    def check_tool(cls, tool: Any) -> Any:
        """Return `tool` unchanged, for the chat template; raise ValidationError if it is not a tool."""
        cls.model_validate(tool)
        if tool.get("type") is None:  # only choices and calls may omit it
            raise field_error("type", "missing")
        return tool


class ContentPart(RequestObject):
    """A part of a message's content."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type", "text") != "text":
            raise PydanticCustomError("part", "this model takes text only")
        return data


_PARTS = TypeAdapter(Items[ContentPart])


def _join_parts(value: Any) -> Any:
    return "\n".join(part.text for part in _PARTS.validate_python(value)) if isinstance(value, list) else value


class Message(RequestObject):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join_parts)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Items[Tool] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise field_error("tool_call_id", "missing")
        if self.content is None and (self.role != "assistant" or self.tool_calls is None):
            raise field_error("content", PydanticCustomError("content", "expected a string"))
        return self

    @classmethod
    def render(cls, data: Any) -> dict[str, Any]:
        """Return the message `data` in the format of chat templates; raise ValidationError if it is not a message. Its
        content is one string or None. Arguments of tool calls are parsed, except invalid JSON, which stays a string.
        The role developer becomes system."""
        message = cls.model_validate(data)
        role = "system" if message.role == "developer" else message.role
        return {"content": None, **message.model_dump(exclude_none=True, warnings=False), "role": role}


Choice = Annotated[
    Tool | str, choose_type(lambda value: isinstance(value, dict), Tool, Literal["none", "auto", "required"])
]


class ChatRequest(GenerationRequest):
    """A request for the next message of a conversation."""

    messages: Items[Annotated[dict[str, Any], PlainValidator(Message.render)]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    tools: Items[Annotated[dict[str, Any], PlainValidator(Tool.check_tool)]] = Field([], max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    modalities: Annotated[Any, allow_only(["text"])] = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    @cached_property
    def choice(self) -> ToolChoice:
        """Return the tools that an answer may or must call; raise ApiError if the chosen one is not among `tools`."""
        names, chosen = [tool["function"]["name"] for tool in self.tools], self.tool_choice
        if not names and chosen not in (None, "none", "auto"):
            raise bad_request("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
        if not isinstance(chosen, Tool):
            return ToolChoice((chosen or "auto") if names else "none", None, self.parallel_tool_calls)
        if chosen.function.name not in names:
            raise bad_request(f"Tool choice {chosen.function.name!r:.80} is not among the 'tools'.", "tool_choice")
        return ToolChoice("named", chosen.function.name, False)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is enabled.", "top_logprobs")
        if self.choice.is_forced and self.constraint is not None:
            raise bad_request(
                "A required tool call cannot be combined with another constraint: remove one of them.",
                self.constraint.param,
            )
        for name in self.chat_template_kwargs.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise bad_request(f"'chat_template_kwargs' cannot set {name}.", "chat_template_kwargs")
        if self.reasoning_effort is not None:
            self.chat_template_kwargs = {"reasoning_effort": self.reasoning_effort, **self.chat_template_kwargs}
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        self.top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self


def _wrap_prompt(value: Any) -> Any:
    """Return an array of prompts; a single prompt (a string or token ids) becomes an array with one element."""
    ids = isinstance(value, list) and value and isinstance(value[0], int)
    return [value] if ids or isinstance(value, str) else value


Ids = Annotated[Items[StrictInt], Field(min_length=1)]
Prompt = Annotated[str | list[int], choose_type(lambda value: isinstance(value, list), Ids, Text)]
Prompts = Annotated[Items[Prompt], Field(min_length=1, max_length=MAX_INPUTS), BeforeValidator(_wrap_prompt)]


class CompletionRequest(GenerationRequest):
    """A request for continuations of prompts: strings or token ids."""

    prompt: Prompts
    max_tokens: Count | None = 16
    top_logprobs: Logprobs | None = Field(None, alias="logprobs")
    echo: bool = False
    suffix: Annotated[str, allow_only("")] = ""
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise field_error("best_of", "none_required")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise bad_request(f"A request has at most {MAX_CHOICES} choices: send fewer prompts or a smaller 'n'.", "n")
        if self.echo and self.top_logprobs is not None:
            raise bad_request("Log-probabilities of prompts are not supported: remove 'echo' or 'logprobs'.", "echo")
        return self


class EmbeddingRequest(RequestObject, extra="forbid"):
    """A request for the embeddings of strings or token ids."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
