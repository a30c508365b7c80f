"""Replaces what may be a secret by `***`, before it reaches a file or a log.

A value is hidden because of the name in front of it, because of its own form (a URL with a password, a known kind of
token), or because it is an option of a file system. A secret under a harmless name is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HIDDEN = "***"

# Names are cut into words at "-", "_", "." and camelCase, and matched as "_words_of_the_name_".
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = re.compile(
    "pass_?(w|phrase|code|key)|(db|root|user)_?pass_|pwds?_|_pw_|secrets?_|credentials?_|_creds?_|_authorization_|_bearer_|cookies?_|_jwts?_|oauth|webhook"
    "|_sig(nature)?_|_(otp|mfa|sas)_"
    "|_(upload|storage)_options_|apikey"
    "|_(access|api|auth|deploy|encryption|master|private|refresh|secret|shared|signing|ssh)_?(key|token)s?_"
)
_MAYBE_SECRET = re.compile("tokens?_|_keys?_|_auth_|_pass_$|_session(_?id)?_$")
# Beside these words a token, a key or a session is not a secret: pad_token, max_tokens, key_dim, sort_key.
_HARMLESS = re.compile(
    "_(batch|bos|budget|cache|class|cls|column|count|decoder|dict|dims?|dtype|embed|embeddings?|end|eos|field|forced"
    "|foreign|group|heads?|ids|image|input|label|layers?|len|length|limit|loss|mask|max|mean|min|n|names?|num|number"
    "|output|pad|padding|per|prediction|primary|prompt|proj|query|ratio|response|sep|sequence|size|sort|special|start"
    "|state|stop|target|text|through|total|types?|unk|vocab)_"
)
_NUMBER = r"[-+]?[\d._]*\d[\d._]*(?:e[-+]?\d+|[kmgtb])?"
_COUNTED = re.compile("(tokens|keys)$")  # where a number tells how many

# A name and what stands between it and its value in an override, a mapping, JSON, YAML, a header or a query.
_NAMED = re.compile(r"""(?<![\w.\-])([\w.\-]+)[\\"'\])]*\s*[=:]>?\s*""")
_SWITCH = "true|false|yes|no|on|off|none|null|~"
_PLAIN_VALUE = re.compile(
    rf"""(\\?["'])?({_SWITCH}|{_NUMBER})(?(1)\1)(?=$|\s*[,;&}})\]\n])""", re.I
)

# Words of a command line: what asks for values (`--token`, `Authorization:`) or for one (`API_KEY`, `-p`), and what
# ends them.
_ASKS = re.compile(r"""^--?([\w.\-]+)$|(?<![\w.\-])([\w.\-]+)[\\"'\])]*[=:]\s*$""")
_ASKS_FOR_ONE = re.compile(r"-p|\w[\w.\-]*")
_OPTION = re.compile(r"--[A-Za-z][\w.\-]*(=.*)?|-[A-Za-z]", re.S)
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./@\-]*=[^=].*", re.S)

# What of a URL may be a key: a password, which may hold slashes, a user's name, and the query.
_PASSWORD = r"://[^\s/@'\"]*:(?!\d+/)[^\s@'\"]*@"
_USER = r"://[^\s/@'\"]*@"
_QUERY = r"(://[^\s?'\"]*\?)[^\s'\"]+"
# Tokens of GitHub, GitLab, Hugging Face, OpenAI and the like, AWS, Slack, Google, npm and PyPI; JWT; private keys.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w\-]{16,}|hf_[A-Za-z0-9]{16,}"
    r"|sk-(?=[\w\-]{0,64}\d)[\w\-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|xox[a-z]-[\w\-]{8,}|AIza[\w\-]{30,}"
    r"|hooks\.slack\.com/services/\S+|discord(?:app)?\.com/api/webhooks/\S+|npm_[A-Za-z0-9]{30,}|pypi-[\w\-]{30,}|eyJ[\w\-]{8,512}\.[\w\-.]+|[Bb]earer[\s:]+[^\s\"']+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*)",
    re.S,
)

# Options of file systems that may stand in a log; whatever else is text or a number may be a key.
_NO_SECRETS = {"endpoint_url", "region_name", "profile", "host", "port", "project"}


def blanked(value: Any, name: str = "") -> Any:
    """A value without what may be a secret, in it or under its `name`; of lists and mappings, each item.

    True, false, None, what is empty, and numbers of tokens and keys stay as they are.
    """
    if _is_secret(name) and not _is_plain(name, str(value)):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {
            _by_form(key) if isinstance(key, str) else key: blanked(item, str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return (
            blanked_words(value)
            if all(isinstance(item, str) for item in value)
            else [blanked(v) for v in value]
        )
    return blanked_words([value])[0] if isinstance(value, str) else value


def blanked_words(words: Iterable[str]) -> list[str]:
    """The words of a command line, or Hydra's overrides, without what may be a secret.

    Within a word, all that follows the first name of a secret is hidden. After an option such as `--password` all words
    up to the next option or override are hidden, after `-p` the next one, unless it is a number.
    """
    shown = list[str]()
    before, hiding, only_one, open_brackets = "", False, False, 0
    for word in map(
        _by_form, words
    ):  # first, so that no key in a URL's query counts as the name of what follows
        if _asks(before, word):
            hiding, only_one = True, _ASKS_FOR_ONE.fullmatch(before) is not None
        elif only_one or _OPTION.fullmatch(word) or _OVERRIDE.fullmatch(word):
            hiding = False
        start = 0 if hiding or open_brackets > 0 else _secret_at(word)
        hidden = word[start:]
        if open_brackets > 0 or hidden.startswith(
            ("{", "[")
        ):  # a mapping or list that the shell has cut at its blanks
            open_brackets += sum(map(hidden.count, "{[")) - sum(map(hidden.count, "]}"))
        shown.append(word[:start] + (_HIDDEN if hidden else ""))
        before = word
    return shown


def without_secrets(text: str, options: Any) -> str:
    """A text in which nothing stands that `public` leaves out of options, and no URL tells what may be a key."""
    for secret in sorted(_leaves(options) - _leaves(public(options)), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _by_form(text)


def holds_password(url: str) -> bool:
    """Whether a URL holds a password, or a query, where keys stand too; a user's name alone is none."""
    return re.search(f"{_PASSWORD}|{_QUERY}", url) is not None


def public(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of options that may hold secrets those that cannot be one: what is true or false, and addresses and places."""
    kept = {
        name: public(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
    }
    return {
        name: value
        for name, value in kept.items()
        if isinstance(value, bool | dict)
        or (name in _NO_SECRETS and "@" not in str(value) and blanked(value) == value)
    }


def _is_secret(name: str, *, surely: bool = False) -> bool:
    """Whether what stands under a name is a secret; `surely`: not where it only may be, as under `key`.

    Each part of a dotted name counts, with those after it: `tokens.per_batch` is harmless, `head.token` is not.
    """
    parts = [f"_{'_'.join(_WORD.findall(part))}_".lower() for part in name[-256:].split(".")]
    rests = ["".join(parts[index:]) for index in range(len(parts))]
    return _SECRET.search(rests[0]) is not None or (
        not surely
        and any(_MAYBE_SECRET.search(rest) and not _HARMLESS.search(rest) for rest in rests)
    )


def _is_plain(name: str, value: str) -> bool:
    """Whether a value tells nothing even under a secret's name: none, true, or a number that counts or is short."""
    many = _COUNTED.search("_".join(_WORD.findall(name)).lower())
    may_count = (many or len(value) < 6) and not _is_secret(name, surely=True)
    nothing = rf"|\[\]|{{}}|{_SWITCH}"
    return re.fullmatch(f"{nothing}|{_NUMBER}" if may_count else nothing, value, re.I) is not None


def _secret_at(text: str) -> int:
    """Where in a text the first value under a secret's name begins; the text's length where there is none."""
    for named in _NAMED.finditer(text):
        value = _PLAIN_VALUE.match(text, named.end())
        alone = not text[: named.start()].strip(
            "+~"
        )  # as in `password=true, or so`: all that follows is the value
        plain = value and _is_plain(named[1], value[2]) and not (alone and value.end() < len(text))
        if not plain and _is_secret(named[1]):
            return named.end()
    return len(text)


def _asks(before: str, word: str) -> bool:
    """Whether on a command line `word` is the value of a secret that the word before it names."""
    if _OPTION.fullmatch(word):
        return False
    if before == "-p":
        return re.fullmatch(_NUMBER, word) is None
    if _ASKS_FOR_ONE.fullmatch(before):
        return _is_secret(before, surely=True) and not (
            _is_plain(before, word) or _OVERRIDE.fullmatch(word)
        )
    named = _ASKS.search(before)
    return (
        named is not None and _is_secret(name := named[1] or named[2]) and not _is_plain(name, word)
    )


def _by_form(text: str) -> str:
    """A text without what is a secret by its form: the user, password and query of URLs, and tokens."""
    return _TOKEN.sub(
        _HIDDEN,
        re.sub(_QUERY, rf"\1{_HIDDEN}", re.sub(f"{_PASSWORD}|{_USER}", f"://{_HIDDEN}@", text)),
    )


def _leaves(value: Any) -> set[str]:
    """The texts in nested options; one of a few characters hides nothing."""
    if isinstance(value, Mapping | list | tuple):
        return set().union(*map(_leaves, value.values() if isinstance(value, Mapping) else value))
    return {str(value)} if len(str(value)) > 3 else set()
