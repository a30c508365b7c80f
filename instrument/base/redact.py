"""Replaces possible secrets by `***` before they reach a file or a log.

A value is hidden if its name or its form suggests a secret. For example, a URL with a password has
such a form, and so does a token of a known kind. The values of options of fsspec's file systems are
hidden too, except for options that are known to be harmless. A secret with a harmless name and a
harmless form is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

_HIDDEN = "***"

# Names are split into words at "-", "_", "." and camelCase, and matched as "_words_of_the_name_".
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    "pass_?(w|phrase|code|key)|(db|root|user)_?pass_|pwds?_|_pw_|secrets?_|credentials?_|_creds?_"
    "|_authorization_|_bearer_|cookies?_|_jwts?_|oauth|webhook|_sig(nature)?_|_(otp|mfa|sas)_"
    "|_(upload|storage)_options_|apikey"
    "|_(access|api|auth|deploy|encryption|master|private|refresh|secret|shared|signing|ssh)"
    "_?(key|token)s?_"
)
_MAYBE_SECRET = re.compile("tokens?_|_keys?_|_auth_|_pass_$|_session(_?id)?_$")
# If a name has token, key or session beside one of these words, the name is harmless: pad_token,
# sort_key.
_HARMLESS = re.compile(
    "_(batch|bos|budget|cache|class|cls|column|count|decoder|dict|dims?|dtype|embed|embeddings?|end"
    "|eos|field|forced|foreign|group|heads?|ids|image|input|label|layers?|len|length|limit|loss"
    "|mask|max|mean|min|n|names?|num|number|output|pad|padding|per|prediction|primary|prompt|proj"
    "|query|ratio|response|sep|sequence|size|sort|special|start|state|stop|target|text|through"
    "|total|types?|unk|vocab)_"
)
# What argparse takes for `--token`, `--password` or `--api-key`: the beginning of its last word.
_ABBREVIATED = re.compile(
    "_(tok|toke|pas|passw|passwo|passwor|passp\\w*|passc\\w*|sec|secr|secre|cre|cred\\w*|cooki|beare"
    "|authori\\w*|webh\\w*|(access|api|auth|private|refresh|secret|ssh)_(ke?|to?))_$"
)
_NUMBER = r"[-+]?[\d._]*\d[\d._]*(?:e[-+]?\d+|[kmgtb])?"
_COUNTED = re.compile("(tokens|keys)$")  # a number with such a name is a count

# A name, and the separator between the name and its value. The pattern matches overrides, mappings,
# JSON, YAML, headers and queries.
_NAMED = re.compile(r"""(?<![\w.\-])([\w.\-]+)[\\"'\])]*\s*[=:]>?\s*""")
_SWITCH = "true|false|yes|no|on|off|none|null|~"
_PLAIN_VALUE = re.compile(
    rf"""(\\?["'])?({_SWITCH}|{_NUMBER})(?(1)\1)(?=$|\s*[,;&}})\]\n])""", re.I
)

# Words of a command line. A word such as `--token` or `Authorization:` names all values after it;
# `_BEFORE_VALUES` matches such words. A word such as `API_KEY` or `-p` names only one value;
# `_BEFORE_ONE_VALUE` matches such words. The values end before a word that matches `_OPTION` or
# `_OVERRIDE`.
_BEFORE_VALUES = re.compile(r"""^(--?[\w.\-]+)$|(?<![\w.\-])([\w.\-]+)[\\"'\])]*[=:]\s*$""")
_BEFORE_ONE_VALUE = re.compile(r"-p|\w[\w.\-]*")
_OPTION = re.compile(r"--[A-Za-z][\w.\-]*(=.*)?|-[A-Za-z]", re.S)
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./@\-]*=[^=].*", re.S)

# Parts of a URL that may be secrets: the password (it may hold slashes), the user's name, and the
# query.
_PASSWORD = r"://[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@"
_USER = r"://[^\s/@'\"]*@"
_QUERY = r"(://[^\s?'\"]*\?)[^\s'\"]+"
# Tokens of GitHub, GitLab, Hugging Face, OpenAI and others, AWS, Slack, Discord, Google, npm and
# PyPI; JWT; bearer tokens; private keys; the value in an error of `requests` about a header.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w\-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|sk-(?=[\w\-]{0,64}\d)[\w\-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|xox[a-z]-[\w\-]{8,}|AIza[\w\-]{30,}|hooks\.slack\.com/services/\S+"
    r"|discord(?:app)?\.com/api/webhooks/\S+|npm_[A-Za-z0-9]{30,}|pypi-[\w\-]{30,}"
    r"|eyJ[\w\-]{8,512}\.[\w\-.]+|[Bb]earer[\s:]+[^\s\"']+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*|(?<=header value: ).+)",
    re.S,
)

# Options of file systems that are no secrets. The text or number of any other option may be secret.
_NO_SECRETS = {"endpoint_url", "region_name", "profile", "host", "port", "project"}


def redact(value: Any, name: str = "") -> Any:
    """Replace possible secrets in a value and in its items.

    A secret is recognised by its form or by its name, which is `name` or the key of a mapping.
    Booleans, None, empty values and counts, such as `max_tokens: 512`, are not replaced.
    """
    if _is_secret(name) and not _is_plain(name, str(value)):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {
            _redact_forms(key) if isinstance(key, str) else key: redact(item, str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value):
            return redact_words(value)
        return [redact(item) for item in value]
    return redact_words([value])[0] if isinstance(value, str) else value


def redact_words(words: Iterable[str]) -> list[str]:
    """Replace possible secrets in the words of a command line or in Hydra's overrides.

    These are hidden:

    - In a word that contains the name of a secret, everything after the name: `password=abc`
      becomes `password=***`.
    - After an option such as `--password`: all words up to the next option or override.
    - After a word such as `API_KEY`: only the next word.
    - After `-p`: only the next word. A number after `-p` is not hidden, because it may be a port.
    - Anywhere: what has the form of a secret, such as the password in a URL.

    Harmless values, such as `true` or an empty text, are not hidden after a name.
    """
    shown = list[str]()
    before, hiding, only_one, open_brackets = "", False, False, 0
    # Queries of URLs are hidden first, so that a key in a query does not count as a secret's name.
    for word in map(_redact_forms, words):
        if _is_secret_value(before, word):
            hiding, only_one = True, _BEFORE_ONE_VALUE.fullmatch(before) is not None
        elif only_one or _OPTION.fullmatch(word) or _OVERRIDE.fullmatch(word):
            hiding = False
        start = 0 if hiding or open_brackets > 0 else _secret_at(word)
        hidden = word[start:]
        # a mapping or list that the shell has split at spaces
        if open_brackets > 0 or hidden.startswith(("{", "[")):
            open_brackets += sum(map(hidden.count, "{[")) - sum(map(hidden.count, "]}"))
        shown.append(word[:start] + (_HIDDEN if hidden else ""))
        before = word
    return shown


def without_secrets(text: str, options: Any) -> str:
    """Hide in a text what looks secret, and the values of all options that may be secret.

    `options` are those of a file system; see `public`.
    """
    for secret in sorted(_leaves(options) - _leaves(public(options)), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _redact_forms(text)


def holds_password(url: str) -> bool:
    """Whether a URL holds a password, or a query (a query may hold keys)."""
    return re.search(f"{_PASSWORD}|{_QUERY}", url) is not None


def public(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only harmless options of a file system, such as booleans and server addresses."""
    kept = {
        name: public(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
    }
    return {
        name: value
        for name, value in kept.items()
        if isinstance(value, bool | dict)
        or (name in _NO_SECRETS and "@" not in str(value) and redact(value) == value)
    }


def _is_secret(name: str, *, surely: bool = False) -> bool:
    """Whether a value with this name may be a secret.

    A word such as `password` always names a secret. A word such as `key` or `token` names a
    secret, unless the name also has a harmless word, such as `per` or `head`. In a dotted name, the
    harmless word must be in the same part or in a later part. So `tokens.per_batch` is harmless,
    but `head.token` is not.

    An option of a command line, which begins with `-`, may be abbreviated, as argparse allows.

    With `surely`, the result is True only for words such as `password`, and False for words such
    as `key`.
    """
    parts = [f"_{'_'.join(_WORD.findall(part))}_".lower() for part in name[-256:].split(".")]
    rests = ["".join(parts[index:]) for index in range(len(parts))]
    may_be = partial(_may_be_secret, is_option=name.startswith("-"))
    return _SECRET.search(rests[0]) is not None or (not surely and any(map(may_be, rests)))


def _may_be_secret(rest: str, *, is_option: bool) -> bool:
    found = _MAYBE_SECRET.search(rest) or (is_option and _ABBREVIATED.search(rest))
    return bool(found) and not _HARMLESS.search(rest)


def _is_plain(name: str, value: str) -> bool:
    """Whether a value is harmless although its name is the name of a secret.

    Empty values and switches such as `true` or `none` are harmless. Counts and short numbers are
    harmless too, except after names such as `password`.
    """
    many = _COUNTED.search("_".join(_WORD.findall(name)).lower())
    may_count = (many or len(value) < 6) and not _is_secret(name, surely=True)
    nothing = rf"|\[\]|{{}}|{_SWITCH}"
    return re.fullmatch(f"{nothing}|{_NUMBER}" if may_count else nothing, value, re.I) is not None


def _secret_at(text: str) -> int:
    """Return the index at which the value of the first secret begins.

    If the text contains no name of a secret, return the length of the text.
    """
    for named in _NAMED.finditer(text):
        value = _PLAIN_VALUE.match(text, named.end())
        # in `password=true, or so`, the value is the whole text after `=`
        alone = not text[: named.start()].strip("+~")
        plain = value and _is_plain(named[1], value[2]) and not (alone and value.end() < len(text))
        if not plain and _is_secret(named[1]):
            return named.end()
    return len(text)


def _is_secret_value(before: str, word: str) -> bool:
    """Whether `word` is a secret value; the value's name is in `before`, the previous word."""
    if _OPTION.fullmatch(word):
        return False
    if before == "-p":
        return re.fullmatch(_NUMBER, word) is None
    if _BEFORE_ONE_VALUE.fullmatch(before):
        return _is_secret(before, surely=True) and not (
            _is_plain(before, word) or _OVERRIDE.fullmatch(word)
        )
    named = _BEFORE_VALUES.search(before)
    return (
        named is not None and _is_secret(name := named[1] or named[2]) and not _is_plain(name, word)
    )


def _redact_forms(text: str) -> str:
    """Replace the parts of a text that have the form of a secret.

    These are users, passwords and queries in URLs, and known kinds of tokens.
    """
    text = re.sub(f"{_PASSWORD}|{_USER}", f"://{_HIDDEN}@", text)
    text = re.sub(_QUERY, rf"\1{_HIDDEN}", text)
    return _TOKEN.sub(_HIDDEN, text)


def _leaves(value: Any) -> set[str]:
    """Return the values in nested options as texts.

    Texts of up to three characters are left out, because they also occur in harmless words.
    """
    if isinstance(value, Mapping | list | tuple):
        return set().union(*map(_leaves, value.values() if isinstance(value, Mapping) else value))
    return {str(value)} if len(str(value)) > 3 else set()
