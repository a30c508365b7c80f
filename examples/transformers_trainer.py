"""Profile a Transformers `Trainer` with a session that is attached to it.

    pip install 'torch-instrument[transformers]'
    python examples/transformers_trainer.py

A step is an optimizer step, here with the gradients of two batches. No mark in the code is needed:
the session records ranges for the waits for data, the forward and backward passes, the optimizer
and the submodules. Evaluation is a separate phase. The model is a tiny GPT-2 with random weights,
so nothing is downloaded. The log shows a table of steps 4 to 8; the capture is in `./profile/`.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from instrument.integrations.transformers import attach


def main() -> None:
    set_seed(0)
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 100))
    examples = [{"input_ids": chunk, "labels": chunk} for chunk in text.split(32)[:-1]]
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=128)
    )
    arguments = TrainingArguments(
        output_dir="checkpoints",
        max_steps=10,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples[:16])
    session = attach(trainer, "summary", wait=3, modules={"depth": 3})
    trainer.train()

    for capture in session.captures:
        for row in capture.ranges.where("name in ('data', 'forward', 'backward', 'optimizer')"):
            if row.depth == 0:
                milliseconds = row.cpu_ns / len(capture.steps) / 1e6
                print(f"{capture.name}: {row.name} took {milliseconds:.3f} ms a step")


if __name__ == "__main__":
    main()
