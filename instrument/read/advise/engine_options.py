"""The options of inference engines that change what a step launches."""

from __future__ import annotations

from instrument.read.facts.cuda_graphs import replayed
from instrument.read.views.views import Views

# By the documentation of vLLM 0.19, SGLang 0.5 and TensorRT-LLM 1.0, and the source of ATOM.
_GRAPHS = {
    "vLLM": "vLLM without --enforce-eager compiles the model and replays CUDA graphs; "
    "cudagraph_mode in --compilation-config says of which steps",
    "SGLang": "SGLang without --disable-cuda-graph replays CUDA graphs in decode",
    "TensorRT-LLM": "TensorRT-LLM with cuda_graph_config replays CUDA graphs in decode",
    "ATOM": "ATOM without --enforce-eager replays CUDA graphs in decode",
}
SIZES = {
    "vLLM": "cudagraph_capture_sizes in --compilation-config",
    "SGLang": "--cuda-graph-bs or --cuda-graph-max-bs",
    "TensorRT-LLM": "batch_sizes in cuda_graph_config",
    "ATOM": "--cudagraph-capture-sizes",
}
_LARGER = {
    "vLLM": "--max-num-batched-tokens and --max-num-seqs",
    "SGLang": "--chunked-prefill-size and --max-running-requests",
    "TensorRT-LLM": "max_num_tokens and max_batch_size",
    "ATOM": "--max-num-batched-tokens and --max-num-seqs",
}


def launch_less(capture: Views, engine: str) -> str:
    """Return which options of an engine launch less often, without a full stop."""
    has_graphs = replayed(capture.events, capture.work.event, capture.work.call).any()
    graphs = f"capture graphs for more batches: {SIZES[engine]}" if has_graphs else _GRAPHS[engine]
    return f"Launch less often: {graphs}. Or let more tokens into a step: {_LARGER[engine]}"
