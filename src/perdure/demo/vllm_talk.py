"""What is said in the demo with vLLM: an agent that works through the operator's guide. The same words in every run."""

from __future__ import annotations

from importlib import resources

Message = dict[str, str]

_CONTEXT_SECTIONS = 6  # of the guide, about 2,300 tokens: the context that everybody shares
_ROLE = (
    "You are an agent that looks after a cache of KV blocks. Answer in one short sentence. This is your handbook.\n\n"
)
# Longer than one block by far: the first long prompt costs a process a second or two once.
WARM = "A kettle, a lamp, a chair and a window stand in the room, and nobody is there to count them. " * 60
# Each turn: what the user or a tool says next. The first ones are answered by server A, the rest by server B.
FIRST_TURNS = (
    "A worker was killed a second ago. What does its successor find?",
    'Tool result: {"host": "gpu-7", "state": "evicted", "blocks": 118, "tenant": "search"}. What happened there?',
    'Tool result: {"disk": "nvme1", "used": 0.93, "reclaim": "running"}. Should anybody be woken up?',
)
LATER_TURNS = (
    "Tool result: server A has been killed with SIGKILL; you now run on server B. What is lost?",
    'Tool result: {"probe": "ok", "late": 0, "corrupt": 0}. Say in a few words how the store is.',
)
SUBTASKS = (
    "You are sub-agent one. Name one thing that would be a reason to stop writing.",
    "You are sub-agent two. Name one thing that a tenant may notice.",
    "You are sub-agent three. Name one thing to look at first tomorrow.",
)


def _sections() -> list[str]:
    guide = (resources.files("perdure.demo") / "guide.md").read_text(encoding="utf-8")
    first, *others = guide.split("\n## ")
    return [first, *(f"## {one}" for one in others)]


def opening() -> list[Message]:
    """The handbook, as every turn begins."""
    return [{"role": "system", "content": _ROLE + "\n".join(_sections()[:_CONTEXT_SECTIONS])}]


def branch(talk: list[Message]) -> list[list[Message]]:
    """The conversation as three sub-agents get it: a plan that is new to all of them, then what each has to do."""
    plan = "Before you split up, read the plan.\n\n" + "\n".join(_sections()[_CONTEXT_SECTIONS : _CONTEXT_SECTIONS + 2])
    return [[*talk, {"role": "user", "content": f"{plan}\n\n{task}"}] for task in SUBTASKS]


def audit() -> str:
    """Another document, of about 1,400 tokens, and the beginning of an answer."""
    return "\n".join(_sections()[-4:]) + "\n\nIn short, an operator should"
