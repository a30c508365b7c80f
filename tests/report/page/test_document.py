"""The payload in a page: as JSON, whatever numbers and names it holds."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from gzip import decompress

import numpy as np
import pytest

from instrument.read.show.page.page import page


@pytest.mark.parametrize("value", [1.5, np.float64(1.5), "\ud83d", {None: 1}, [True, None]])
def test_the_payload_is_json(value: object) -> None:
    payload = {"title": "a", "sections": {"x": value}}
    packed = re.findall(r'id="payload">([^<]*)<', page(payload).html)[0]
    assert json.loads(decompress(b64decode(packed))) == json.loads(json.dumps(payload))
