"""Messages gone wrong: the golden ones with a part replaced, removed, doubled or renamed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
REQUESTS = {
    "chat_request": "/v1/chat/completions",
    "completion_request": "/v1/completions",
    "prefix_request": "/v1/prefix",
    "embeddings_request": "/v1/embeddings",
    "job_request": "/v1/jobs",
    "policy_request": "/v1/policy/validate",
    "pair_request": "/v1/pair",
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def examples(kind: str) -> list[Any]:
    """Return the golden requests of a kind."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob(f"{kind}*.json"))]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every part of a message."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> Any:
    """Draw a golden request of the kind with one to three things wrong."""
    message = copy.deepcopy(draw(st.sampled_from(examples(kind))))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(message)))
        if not path:
            return draw(JSON)
        *parents, last = path
        node = message
        for key in parents:
            node = node[key]
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "replace":
            node[last] = draw(JSON)
        elif how == "remove":
            del node[last]
        elif isinstance(node, dict):
            node[draw(st.text(max_size=12))] = draw(JSON)
        else:
            node.insert(last, draw(JSON))
    return message
