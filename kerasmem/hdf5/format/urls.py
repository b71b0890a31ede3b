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
    """Return the scheme of a URL in lower case."""
    return url.split("://", 1)[0].lower()


def redact(text: str) -> str:
    """Hide users, passwords, queries and fragments of URLs in a text.

    Examples:
        >>> redact("https://me:secret@example.org/a.h5?X-Amz-Signature=abc")
        'https://…@example.org/a.h5?…'
    """
    return _WITHIN.sub(lambda match: match[1] + _hide_secrets(match[2]), text) if "://" in text else text


def _hide_secrets(rest: str) -> str:
    cut = min((index for index in (rest.find("?"), rest.find("#")) if index >= 0), default=len(rest))
    location, query = rest[:cut], rest[cut : cut + 1] + "…" if cut < len(rest) else ""
    # Passwords may hold an unencoded slash, and names in stores rarely hold "@".
    host, slash, path = location.partition("/")
    if "@" in host:
        host = "…@" + host.rsplit("@", 1)[1]
    elif re.match(r"[^/@]*:[^@]*@", location):
        host, slash, path = "…@" + location.rsplit("@", 1)[1], "", ""
    return host + slash + path + query


def identity(url: str) -> str:
    """Return the URL of an object without credentials and signatures."""
    parts = urlsplit(url)
    fields = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode(sorted(field for field in fields if not _SECRET.search(field[0])))
    return parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1], query=query, fragment="").geturl()


def comparable_path(path: str) -> str:
    """Return an absolute path for a path or URL, so that several can be compared."""
    if not is_url(path):
        return path
    parts = urlsplit(path)
    return f"/{parts.scheme}/{parts.netloc.rsplit('@', 1)[-1]}/{parts.path.lstrip('/')}"
