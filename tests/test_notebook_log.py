"""In a notebook, nothing that is logged is on stderr, which notebooks show on red."""

from __future__ import annotations

import pytest
import warm

_SCRIPT = """
import sys, types
from loguru import logger
from instrument.record.notebook import log_to_stdout
{before}
log_to_stdout()
logger.info("recorded")
"""
_SESSION = """
from loguru import logger
from instrument import Session
Session(enabled=False).start()
logger.info("a message")
"""
_NOTEBOOK = "sys.modules['ipykernel'] = types.ModuleType('ipykernel')"
# as with LOGURU_AUTOINIT=0 in the environment: then the first handler is the program's
_OWN_HANDLER = f"""{_NOTEBOOK}
import importlib, os
from instrument.record import notebook
os.environ["LOGURU_AUTOINIT"] = "0"
for name in [each for each in sys.modules if each.startswith("loguru")]:
    del sys.modules[name]
from loguru import logger
assert logger.add(sys.stderr) == 0
log_to_stdout = importlib.reload(notebook).log_to_stdout
"""


@pytest.mark.parametrize(
    ("before", "in_stdout"),
    [
        (_NOTEBOOK, True),
        (f"{_NOTEBOOK}\nlog_to_stdout()", True),
        ("", False),
        (f"{_NOTEBOOK}\nlogger.remove()\nlogger.add(sys.stderr)", False),
        (_OWN_HANDLER, False),
    ],
    ids=["notebook", "notebook_twice", "script", "own_handler", "own_first_handler"],
)
def test_where_messages_go(before: str, in_stdout: bool) -> None:
    done = warm.run_code(_SCRIPT.format(before=before))
    assert done.stdout.count("recorded") == in_stdout
    assert done.stderr.count("recorded") == (not in_stdout)


def test_the_log_of_a_session_in_a_notebook_is_on_stdout() -> None:
    done = warm.run_code(f"import sys, types\n{_NOTEBOOK}\n{_SESSION}")
    assert "a message" in done.stdout
    assert "a message" not in done.stderr
