"""Text in, token ids out, and back piece by piece.

Tokenisers are ``transformers``' own. For a GGUF file its conversion takes many seconds, so the
common kind (byte-level BPE, ``tokenizer.ggml.model`` = gpt2) is built straight from the metadata
with ``tokenizers`` and wrapped in ``PreTrainedTokenizerFast``; other kinds go the slow way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

Message = dict[str, str]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How text is cut before BPE, by ``tokenizer.ggml.pre``. Source: the tokenizer.json of each family.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}| ", r"|\p{N}{1,3}| ")


def _byte_level(*before: Any, regex: bool) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    return pre_tokenizers.Sequence([*before, last])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _pre_tokenizer(name: str) -> Any:
    if name in ("gpt-2", "default"):
        return _byte_level(regex=True)
    if name == "smollm":
        return _byte_level(pre_tokenizers.Digits(individual_digits=True), regex=True)
    if name == "qwen2":
        return _byte_level(_split(_QWEN2), regex=False)
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return _byte_level(_split(_LLAMA3), regex=False)
    return None


def from_gguf(path: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokeniser (with its chat template) that a GGUF file carries."""
    pre = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre is None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre
    if metadata.get("tokenizer.ggml.pre") == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            named[f"{role}_token"] = tokens[token]
    template = metadata.get("tokenizer.chat_template")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)
    # Read by ``encode``: some checkpoints (Llama 3) want their first token put before every text.
    if metadata.get("tokenizer.ggml.add_bos_token") and wrapped.bos_token_id is not None:
        from tokenizers.processors import TemplateProcessing

        wrapped.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{wrapped.bos_token}:0 $A:0",
            special_tokens=[(wrapped.bos_token, wrapped.bos_token_id)],
        )
    return wrapped


def from_folder(folder: Path) -> Any:
    """The tokeniser of a Hugging Face folder."""
    from transformers import AutoTokenizer

    if not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        raise ValueError(f"{folder}: expected a tokenizer.json, got none")
    return AutoTokenizer.from_pretrained(str(folder))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text, with the tokens that this tokeniser puts before every text."""
    return list(tokenizer(text, verbose=False)["input_ids"])  # its length is judged by the caller


def encode_chat(
    tokenizer: Any, prompt: str, *, system: str | None = None, think: bool | None = None
) -> list[int]:
    """Ids of a prompt put into the chat template, ready for the reply.

    ``think`` goes to the template as ``enable_thinking``; templates that do not know it ignore it.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    switches = {} if think is None else {"enable_thinking": think}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **switches
    )
    # The template writes special tokens itself.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Detokenizer:
    """Turns ids into text as they come: never half a character, never a lost space.

    ``push`` returns the text that is certain by now. A token may hold part of a UTF-8 character
    (its decoding ends in U+FFFD) and its spacing may depend on the one before, so each piece is the
    difference of two decodings that start at the same earlier token. Text that could still become
    a stop string is held back; ``stopped`` says that one came.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.ids: list[int] = []
        self.start = self.done = 0  # first token of the window; tokens before ``done`` are out
        self.held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that this token settles, perhaps none."""
        self.ids.append(token)
        before = self._decode(self.ids[self.start : self.done])
        now = self._decode(self.ids[self.start :])
        if now.endswith("\ufffd"):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return self._release(now[len(before) :], last=False)

    def finish(self) -> str:
        """What was held back, at the end."""
        before = self._decode(self.ids[self.start : self.done])
        rest = self._decode(self.ids[self.start :])[len(before) :]
        self.start = self.done = len(self.ids)
        return self._release(rest, last=True)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _release(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self.held + new
        hits = [text.find(s) for s in self.stop if s in text]
        if hits:
            self.stopped, self.held = True, ""
            return text[: min(hits)]
        keep = 0 if last else max((_overlap(text, s) for s in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that a stop string begins with."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
