"""What vLLM says of itself: its health, its metrics to relay, and the few of them that tell how busy it is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from farfill.engine.protocol import EngineTotals

_OWN = (b"vllm:", b"# HELP vllm:", b"# TYPE vllm:")
# Names of 0.32.
_KV_USAGE = "vllm:kv_cache_usage_perc"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_STEPS, _PREEMPTIONS = "vllm:iteration_tokens_total_count", "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look at vLLM. `kv_usage` is the share of its KV memory in use; `exposition` its metrics as it gave them."""

    ready: bool = True
    kv_usage: float = 0.0
    totals: EngineTotals = field(default_factory=EngineTotals)
    exposition: bytes = b""


def read_vitals(text: bytes) -> Vitals:
    """From the answer of vLLM's /metrics. Those of the Python process and of its HTTP server are left out."""
    lines = [line for line in text.splitlines() if line.startswith(_OWN)]
    sums: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        if line.startswith(b"#"):
            continue
        series, _, value = line.decode().rpartition(" ")
        sums[series.partition("{")[0]] += float(value)
    hits = int(sums[_HITS])
    return Vitals(
        kv_usage=sums[_KV_USAGE],
        totals=EngineTotals(
            decode_steps=int(sums[_STEPS]),
            hit_tokens=hits,
            miss_tokens=int(sums[_QUERIES]) - hits,
            set_back_growth=int(sums[_PREEMPTIONS]),
        ),
        exposition=b"".join(line + b"\n" for line in lines),
    )
