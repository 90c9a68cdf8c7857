"""A server's words without what it may have echoed of ours: keys, header values, user info in URLs.

Pure text; must run before a text is cut, or half a key may be left at its end.
"""

import re

from lpxtop.format import clean
from lpxtop.plan import Secrets

MASK = "…"
_SHORT = 8
_SHAPES = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=*-]{4,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:sk|pk|rk|gsk|hf|xai|nvapi|csk|tgp)[-_][\w*.-]{6,}"), MASK),
    (re.compile(r"://[^/\s@]+@"), f"://{MASK}@"),
)
"""What looks like a credential, whoever's it is."""


def scrubbed(text: str, secrets: Secrets, limit: int = 300) -> str:
    """One clean line of at most `limit` characters without any secret."""
    for secret in (secrets.api_key, secrets.proxy_auth, *secrets.headers.values()):
        if not secret:
            continue
        if len(secret) < _SHORT:  # a word like "1": only where it stands alone
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
        else:
            text = text.replace(secret, MASK)
    for shape, mask in _SHAPES:
        text = shape.sub(mask, text)
    return clean(text, limit)
