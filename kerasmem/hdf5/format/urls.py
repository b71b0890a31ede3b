"""Recognize URLs, redact them, and identify their objects."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://")
_WITHIN = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)((?:(?!::[A-Za-z])[^\s'\"<>])*)")
_SECRET = re.compile(r"sign|token|credential|key|secret|password|expires|date|policy|algorithm|^s[a-z]{1,2}$", re.I)


def is_url(text: str) -> bool:
    """Return whether a path is a URL."""
    return bool(_URL.match(text))


def scheme_of(url: str) -> str:
    """Return a URL's scheme in small letters."""
    return url.split("://", 1)[0].lower()


def redact(text: str) -> str:
    """Return text with users, passwords, queries and fragments of URLs hidden.

    Examples:
        >>> redact("https://me:secret@example.org/a.h5?X-Amz-Signature=abc")
        'https://…@example.org/a.h5?…'
    """
    return _WITHIN.sub(lambda found: found[1] + _without_secrets(found[2]), text) if "://" in text else text


def _without_secrets(rest: str) -> str:
    cut = min((at for at in (rest.find("?"), rest.find("#")) if at >= 0), default=len(rest))
    place, query = rest[:cut], rest[cut : cut + 1] + "…" if cut < len(rest) else ""
    # A password may hold a slash that nobody encoded; a name in a store rarely holds "@".
    host, slash, path = place.partition("/")
    if "@" in host:
        host = "…@" + host.rsplit("@", 1)[1]
    elif re.match(r"[^/@]*:[^@]*@", place):
        host, slash, path = "…@" + place.rsplit("@", 1)[1], "", ""
    return host + slash + path + query


def identity(url: str) -> str:
    """Return the identity of an object: its URL without credentials and signatures."""
    parts = urlsplit(url)
    kept = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if not _SECRET.search(name)]
    return parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1], query=urlencode(sorted(kept)), fragment="").geturl()


def place_of(path: str) -> str:
    """Return an absolute path for a file or URL, so that the names of several can be compared."""
    if not is_url(path):
        return path
    parts = urlsplit(path)
    return f"/{parts.scheme}/{parts.netloc.rsplit('@', 1)[-1]}/{parts.path.lstrip('/')}"
