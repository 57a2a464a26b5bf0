"""How a dense encoder turns text into a vector: prefixes, pooling, normalisation, lengths.

Read from the files that sentence-transformers models carry; what they do not say comes from a table of encoder
families, looked up by family name (`--retriever_name`), never by part of a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from search_r1.errors import EncoderError

ReadJson = Callable[[str], Any]  # the decoded JSON file of that name in the model's folder, or None
Shape = TypeVar("Shape")

POOLINGS = ("mean", "cls", "max", "lasttoken", "pooler")
_QUERY_PROMPTS, _PASSAGE_PROMPTS = ("query", "s2p_query"), ("document", "passage")


@dataclass(frozen=True)
class EncoderSpec:
    """`max_query_tokens` and `max_passage_tokens`, of texts for which no other length is asked, include special tokens
    and prefix. `longest`: what the model's files say it takes, None if they do not say.

    `end_token` ends every text whose tokenizer adds none; `title_pair`: a passage is its title, a separator, its text.
    """

    pooling: str = "mean"
    normalize: bool = True
    query_prefix: str = ""
    passage_prefix: str = ""
    max_query_tokens: int = 256
    max_passage_tokens: int = 256
    longest: int | None = None
    end_token: str = ""
    title_pair: bool = False

    def index_fields(self) -> dict[str, Any]:
        """The fields on which passages and queries must agree, as stored in an index manifest."""
        fields = asdict(self)
        del fields["max_query_tokens"], fields["max_passage_tokens"], fields["longest"]
        return fields


class Module(BaseModel):
    """An entry of modules.json: the class of a step from text to vector, and the folder of its files."""

    type: str
    path: str


class SentenceBertConfig(BaseModel):
    """What is read of sentence_bert_config.json."""

    max_seq_length: NonNegativeInt | None = None


class SentenceTransformersConfig(BaseModel):
    """What is read of config_sentence_transformers.json."""

    prompts: dict[str, str | None] | None = None
    activation_fn: str | None = None


SENTENCE_TRANSFORMERS = "config_sentence_transformers.json"


def read_checked(read_json: ReadJson, name: str, shape: type[Shape]) -> Shape | None:
    """The content of the file `name`, or None without one. Raises `EncoderError` if it is of another shape."""
    content = read_json(name)
    if content is None:
        return None
    try:
        return TypeAdapter(shape).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole file"
        raise EncoderError(f"the model's {name}: {where}: {first['msg']}; fetch the encoder's files again") from error


FAMILIES = {
    "e5": EncoderSpec(query_prefix="query: ", passage_prefix="passage: "),
    "bge": EncoderSpec(pooling="cls", query_prefix="Represent this sentence for searching relevant passages: "),
    "contriever": EncoderSpec(normalize=False),
    "gte": EncoderSpec(),
    "minilm": EncoderSpec(),
    "nomic": EncoderSpec(query_prefix="search_query: ", passage_prefix="search_document: "),
    "qwen3": EncoderSpec(
        pooling="lasttoken",
        query_prefix="Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
        end_token="<|endoftext|>",
    ),
    "dpr": EncoderSpec(pooling="pooler", normalize=False, title_pair=True),
}


def resolve_spec(family: str, read_json: ReadJson, pooling: str | None = None) -> EncoderSpec:
    """The model's own files override the table of families; `pooling` overrides both. Raises `EncoderError`."""
    # The table's entry, and over it what the model's modules say.
    modules = read_checked(read_json, "modules.json", list[Module])
    known = FAMILIES.get(family.lower())
    if known is None and modules is None:
        raise EncoderError(
            f"{family!r} is not a known encoder family ({', '.join(FAMILIES)}) and the model has no modules.json that "
            "says how to pool; pass a known --retriever_name / --retrieval_method"
        )
    spec = known or EncoderSpec()
    if modules is not None:
        spec = _from_modules(spec, modules, read_json)
    # Non-empty prompts of the model win over the table; an empty one says nothing.
    own = read_checked(read_json, SENTENCE_TRANSFORMERS, SentenceTransformersConfig)
    prompts = (own and own.prompts) or {}
    query = next(filter(None, map(prompts.get, _QUERY_PROMPTS)), spec.query_prefix)
    passage = next(filter(None, map(prompts.get, _PASSAGE_PROMPTS)), spec.passage_prefix)
    spec = replace(spec, query_prefix=query, passage_prefix=passage)

    if pooling is not None:
        spec = replace(spec, pooling=pooling)
    if spec.pooling not in POOLINGS:
        raise EncoderError(f"pooling {spec.pooling!r} is not one of {', '.join(POOLINGS)}")
    return spec


def _from_modules(spec: EncoderSpec, modules: list[Module], read_json: ReadJson) -> EncoderSpec:
    kinds = {module.type.rsplit(".", 1)[-1]: module.path for module in modules}
    # With a module left out, such as a layer after the pooling, the vectors would be wrong without any error.
    unsupported = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if unsupported or "Pooling" not in kinds:
        raise EncoderError(
            f"modules.json has {', '.join(kinds)}; only Transformer, Pooling and Normalize are supported"
        )
    config = read_checked(read_json, f"{kinds['Pooling']}/config.json", dict[str, Any]) or {}
    # What the model's files say can only shorten the usual lengths of texts.
    sizes = read_checked(read_json, "sentence_bert_config.json", SentenceBertConfig)
    longest = None if sizes is None else sizes.max_seq_length
    limit = longest or spec.max_query_tokens
    return replace(
        spec,
        pooling=_pooling(config),
        normalize="Normalize" in kinds,
        max_query_tokens=min(spec.max_query_tokens, limit),
        max_passage_tokens=min(spec.max_passage_tokens, limit),
        longest=longest,
    )


def _pooling(config: dict[str, Any]) -> str:
    """The one mode of a Pooling module, in the flag form (`pooling_mode_mean_tokens`) or the named form."""
    if not config.get("include_prompt", True):
        raise EncoderError(
            "the Pooling module leaves the prompt out of the mean (include_prompt: false): not supported"
        )
    named = config.get("pooling_mode")
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [named] if named else [key.removeprefix("pooling_mode_").removesuffix("_tokens") for key in flags]
    modes = ["cls" if mode == "cls_token" else mode for mode in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise EncoderError(f"the Pooling module asks for {modes or 'nothing'}; exactly one of {POOLINGS} is supported")
    return str(modes[0])
