"""What of command lines, overrides, metadata and options may be a secret and is never written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from own_sinks import Hook

from instrument import ProfilerConfig, Session
from instrument.base.redact import redact, redact_words

HIDDEN = "hUnter2-of-7"


# argparse takes --tok for --token, and --api-k for --api-key
@pytest.mark.parametrize(
    "words",
    [
        ["--password=§"], ["--password", "§"], ["--db-password", "§"], ["--token=§"],
        ["--token", "§"], ["--hf_token=§"], ["--secret=§"], ["--aws_secret_access_key=§"],
        ["--passwd=§"], ["--pwd", "§"], ["--auth", "Bearer:§"], ["--auth", "Basic", "§"],
        ["--auth", "me", "§"], ["api_key=§"], ["--wandb-key=§"], ["--api-key", "§"], ["-p", "§"],
        ["-p=password:§"], ["https://u:§@host/x"], ["s3://bucket/x?sig=§"],
        ["Authorization: Bearer §"], ["-H", "Authorization:", "Basic", "§"], ["X-Api-Key: §"],
        ["--header", "Cookie: id=1; sid=§"], ['--credentials={"k":"§"}'],
        ["--credentials", '{"k":"§"}'], ["--credentials", '{"k":', '"§",', '"j":', '"§"}'],
        ["model.access_token=§"], ["+a.b.token=§"], ["++logger.wandb.apiKey=§"],
        ["credentials.k=§"], ["secrets.db.host=§"], ["model={lr: 0.1, api_key: §}"],
        ["model={lr: 0.1, api_key: ", "§}"], ["+profiler={upload_options: {a: ", "§}}"],
        ["upload_options={key:K,", "{secret:§}", "x:1}"], ["x.upload_options.secret=§"],
        ["--upload_options.key", "§"], ["tracking_uri=https://host/x?sig=§"],
        ["--password", "two words §"], ["--password=two words, §"], ["--password=true, §"],
        ["--password='§"], ["--env=HF_TOKEN=§"], ["--env", "PGPASSWORD=§"],
        ["--set=os.environ['API_TOKEN']=§"], ['--json={"a": {"client_secret" : "§"}}'],
        [r"--json={\"passWord\": \"§\"}"], ["--tokens", "§", "§"], ["--api-keys=§"],
        ["WANDB.API_KEY", "§"], ["--dsn", "AccountName=x;AccountKey=§"],
        ["--cb", "http://localhost/#access_token=§"], ["--session-id", "§"], ["--passphrase", "§"],
        ["--tok=§"], ["--hf-toke", "§"], ["--passw", "§", "§"], ["--client-secr=§"],
        ["--api-k", "§"], ["-tok=§"], ["db_pass=§"], ["oauth2=§"], ["--webhook=https://host/§"],
        ["--sas", "?sv=1&sig=§"], ["--db_pw=§"], ["token=§", "--token", "1234567"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_secret_on_the_command_line_is_hidden_and_the_rest_stays(words: list[str]) -> None:
    given = [word.replace("§", HIDDEN) for word in words]
    shown = redact_words(["train.py", "lr=0.1", *given, "steps=3", "--epochs", "4", "out/x"])
    assert "***" in str(shown)
    assert HIDDEN not in str(shown)
    assert shown[:2] == ["train.py", "lr=0.1"]
    assert shown[-4:] == ["steps=3", "--epochs", "4", "out/x"]
    assert len(shown) == len(words) + 6


@pytest.mark.parametrize(
    "words",
    [
        ["max_tokens=5"],
        ["model.max_tokens=5", "n_tokens=1e9", "tokens_per_batch=4096", "tokens=1_000"],
        ["--tokens", "4096", "data/train"],
        [
            "tokenizer=gpt2",
            "tokenizer.pad_token=[PAD]",
            "eos_token_id=50256",
            "--token-type",
            "word",
        ],
        ["num_key_value_heads=8", "key_dim=64", "sort_key=name", "data.image_key=jpg", "keys=3"],
        ["pass_through=identity", "passes=3", "compass=north", "bypass=all"],
        ["monkey=1", "keyboard=us", "turkey", "author=me", "authors=[a,b]"],
        ["session.max_steps=10", "session.name=first"],
        ["token_dropout=0.1", "token_id=4", "train.tokens=300B", "dataset.session=3"],
        ["use_auth_token=false", "--token=null", "password=None", "model={token: true, lr: 0.1}"],
        ["--use-auth-token", "--lr", "0.1"],
        ["--password", "--lr", "0.1"],
        ["-p", "29500", "x"],
        ["--master-port=29500", "https://host/path", "s3://bucket/run@3", "/data/token/a.txt"],
        [
            "'a=b c=d'", "lr=1e-3", "~profiler.sinks.table", "profiler/sinks=[table,stacks]", "x:1",
            "",
        ],
        ["secretary=me", "password", "lr=1"],
        ["sk-learn-with-a-rather-long-name", "task-1234567890abcdefghij", "hf_transfer", "a" * 64],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_only_resembles_a_secret_stays(words: list[str]) -> None:
    assert redact_words(words) == words


@pytest.mark.parametrize(
    "token",
    [
        "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2_" * 6, "glpat-" + "a1B2-" * 4,
        "hf_" + "aBcD" * 9, "sk-proj-" + "a1B2_-" * 8, "AKIA" + "ABCD1234" * 2,
        "xoxb-" + "1234-" * 5, "AIza" + "a1B2-" * 7, "npm_" + "a1B2" * 9,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_known_kinds_of_tokens_are_hidden_wherever_they_stand(token: str) -> None:
    assert redact_words([f"run={token}"]) == ["run=***"]
    assert redact({"note": ["a", {"b": f"see {token}"}]}) == {"note": ["a", {"b": "see ***"}]}
    assert [*redact({token: 1})] == ["***"]


def test_metadata_is_hidden_by_the_names_of_its_keys() -> None:
    given = {
        "db": f"postgres://u:{HIDDEN}@h/db",
        "hf_token": HIDDEN,
        "nested": {"apiKey": [HIDDEN], "lr": 0.1, "login": {"password": 12345, "user": "me"}},
        "credentials": {"a": {"b": HIDDEN}},
        "argv": ["train.py", "--token", HIDDEN],
        "yaml": f"lr: 0.1\npassword: {HIDDEN}\n",
        "max_tokens": 5,
        "tokens": 1e9,
        "tokens_seen": [1, 2],
        "use_auth_token": True,
        "token": None,
        "secrets": [],
    }
    assert redact(given) == {
        **given,
        "db": "postgres://***@h/db",
        "hf_token": "***",
        "nested": {"apiKey": "***", "lr": 0.1, "login": {"password": "***", "user": "me"}},
        "credentials": "***",
        "argv": ["train.py", "--token", "***"],
        "yaml": "lr: 0.1\npassword: ***",
        "tokens_seen": "***",
    }


# No blanks and no brackets: a value that a shell hands on as one word, and that ends no mapping.
secrets = st.from_regex(r"[A-Za-z0-9!$%^*_+~.][A-Za-z0-9!$%^*_+~./-]{7,30}", fullmatch=True)
names = st.sampled_from(
    ["password", "db_passwd", "hfToken", "X-Api-Key", "aws.secret_access_key", "credentials"]
)
forms = st.sampled_from(
    [
        "--{n}={s}", "+{n}={s}", "{n}: {s}", "a={{b: 1, {n}: {s}}}", '{{"{n}": "{s}"}}',
        "x?y=1&{n}={s}", "-e{n}={s}",
    ]
)  # fmt: skip


@given(names, secrets, forms, st.lists(st.text(max_size=8), max_size=3))
@example("password", "true,hunter2", "--{n}={s}", [])
def test_no_secret_is_shown(name: str, secret: str, form: str, others: list[str]) -> None:
    words = [form.format(n=name, s=secret)]
    for shown in (redact_words([*others, *words]), redact_words([*others, f"--{name}", secret])):
        assert secret not in shown[-1]
        assert secret not in json.dumps(redact({"a": [{name: {"b": secret}}]}))
    assert len(redact_words([*others, *words, *others])) == 2 * len(others) + 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_hiding_twice_changes_nothing_more(value: Any) -> None:
    once = redact(value)
    assert redact(once) == once


def test_a_large_text_takes_no_longer_than_its_length() -> None:
    for part in ("a", "a.", "a ", "{", "-", "token ", "a="):
        text = part * (10**4 if part in ("token ", "a=") else 10**5)
        assert redact_words([text]) == [text]


def test_a_run_writes_no_secret_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = ["git", "remote", "add", "origin", f"https://me:{HIDDEN}@host/x.git"]
    for command in (["git", "init", "-q"], remote):
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "train.py").touch()
    file = str(tmp_path / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--password", HIDDEN, "steps=3"])
    monkeypatch.setenv("HF_TOKEN", HIDDEN)
    metadata = {"db": f"postgres://u:{HIDDEN}@h/db", "keys": {"k": HIDDEN}, "model": "vit"}
    sinks = {
        "table": {},
        "hook": Hook(token=HIDDEN),
        "chrome_trace": {"gzip": False, "metadata": {"token": HIDDEN}},
    }
    with Session(active=1, output_dir=tmp_path / "out", sinks=sinks, metadata=metadata) as session:
        session.add_metadata("api_key", HIDDEN)
        session.step()
    (capture,) = session.captures
    # a sink gets its options as they are
    assert (capture.folder / "token.txt").read_text() == HIDDEN
    (capture.folder / "token.txt").unlink()
    written = {path: path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert len(written) > 3
    assert not [path.name for path, text in written.items() if HIDDEN in text]
    about = capture.metadata
    shown = {"db": "postgres://***@h/db", "keys": "***", "model": "vit", "api_key": "***"}
    assert about["user_metadata"] == shown
    assert about["command"] == ["train.py", "--password", "***", "steps=3"]
    config = ProfilerConfig(sinks={"hook": Hook(token=HIDDEN)}, upload_options={"key": HIDDEN})
    assert HIDDEN not in repr(config)
