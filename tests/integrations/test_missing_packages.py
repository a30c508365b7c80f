"""A trainer that is not installed: the command that installs it is named."""

from __future__ import annotations

import warm


def test_the_command_that_installs_a_missing_trainer_is_named() -> None:
    code = """
        import sys
        for name in ("transformers", "ignite", "lightning"):
            sys.modules[name] = sys.modules["pytorch_lightning"] = None
            try:
                __import__(f"instrument.integrations.{name}")
            except ImportError as error:
                print(error)
    """
    done = warm.run_code(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "The Transformers callback needs the package transformers: pip install 'torch-instrument[transformers]'.",
        "Attaching to an Ignite engine needs the package pytorch-ignite: pip install 'torch-instrument[ignite]'.",
        "The Lightning callback needs the package lightning: pip install 'torch-instrument[lightning]'.",
    ]
