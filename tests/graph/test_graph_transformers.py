"""Models of the Transformers library, which only `torch.export` can capture."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from instrument.graph import GraphProfile, profile_graph

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor], GraphProfile]:
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        attn_implementation="eager",  # products that torch's counter counts on a CPU too
    )
    model = transformers.BertModel(config).eval()
    inputs = {
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "input_ids": torch.arange(16).reshape(2, 8),
    }
    with torch.no_grad():
        return model, inputs, profile_graph(model, **inputs, runs=2, warmup=0)


def test_a_bert_is_exported(bert: tuple) -> None:
    _, _, profile = bert
    assert profile.how.startswith("torch.export, because torch.fx.symbolic_trace cannot follow ")
    assert "modeling_bert.py:" in profile.how


def test_its_nodes_know_their_modules_lines_and_flops(bert: tuple) -> None:
    model, inputs, profile = bert
    (query,) = (
        row
        for row in profile.nodes
        if row.module_path == "encoder.layer.1.attention.self.query" and row.flops
    )
    assert (query.op, query.target) == ("call_function", "aten.linear.default")
    assert query.module_type == "Linear"
    assert "modeling_bert.py:" in query.source
    assert query.flops == 2 * 2 * 8 * 16 * 16
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    assert (
        sum(n for n in profile.nodes.column("flops") if n is not None) == counter.get_total_flops()
    )
    layers = profile.by("module_path", depth=3).where("module_path like 'encoder.layer%'")
    assert len(set(layers.column("flops"))) == 1, "both layers compute the same"


def test_a_language_model_in_training() -> None:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.arange(16).reshape(2, 8)
    profile = profile_graph(model, input_ids=ids, labels=ids, use_cache=False, runs=1, warmup=0)
    assert profile.nodes.where(target="aten.dropout.default")
