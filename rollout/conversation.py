"""One agent's conversation in an episode: token ids that only grow, and what happens when there is no room for more."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conf.choices import Context, Rewrite
from conf.schema import EnvConfig
from rl.types import Completion
from rollout.chat import Bridge
from rollout.environment import Message, Tool
from rollout.trajectory import Kind, Tree

SUMMARY_REQUEST: Message = {
    "role": "user",
    "content": "There is no room left for this conversation. Sum up what matters of it for finishing the task: what "
    "was asked, what you have found out and done, and what is still to do.",
}
SUMMARY_INTRODUCTION = "What happened so far, in your own words:\n"
CUT = "\n[{count} tokens are left out here]\n"


@dataclass(kw_only=True)
class Conversation:
    """`ids` is what the engine has seen and made up to where the agent acts next; `node` is its place in the tree.

    head: the tokens of its beginning. starts: where in `ids` each of its turns begins. last: its newest turn.
    """

    agent: str
    head_messages: list[Message]
    tools: list[Tool]
    node: int = -1
    ids: list[int] = field(default_factory=list)
    head: int = 0
    starts: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # all of it, for templates that render it anew


def begin(bridge: Bridge, tree: Tree, agent: str, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
    """A conversation before its first turn."""
    found = Conversation(agent=agent, head_messages=[*messages], tools=[*tools], messages=[*messages])
    found.ids = bridge.first(messages, tools)
    found.head = len(found.ids)
    found.node = tree.attach(found.ids, agent)
    return found


def add_turn(conversation: Conversation, tree: Tree, completion: Completion, text: str) -> None:
    """Appends what the policy has sampled."""
    conversation.starts.append(len(conversation.ids))
    conversation.node = tree.add_action(conversation.node, completion, conversation.agent)
    conversation.ids += completion.token_ids
    conversation.last = completion.token_ids
    conversation.messages.append({"role": "assistant", "content": text})


def add_messages(
    conversation: Conversation, bridge: Bridge, tree: Tree, messages: Sequence[Message], rewrite: Rewrite
) -> None:
    """Appends what follows a turn, up to the next one."""
    agent = conversation.agent
    conversation.messages += messages
    if rewrite is Rewrite.fork:
        conversation.ids = bridge.first(conversation.messages, conversation.tools)
        conversation.node = tree.attach(conversation.ids, agent)
        return
    following = bridge.extend(conversation.last, messages)
    node = tree.add(conversation.node, Kind.close, following.close, agent)
    conversation.node = tree.add(node, Kind.observation, following.observation, agent)
    conversation.ids += following.close + following.observation


def slide(conversation: Conversation, tree: Tree, turns: int) -> bool:
    """Leaves the turns between the beginning and the newest `turns` out, on a path of its own; whether there were any.

    The ids that stay are those that the engine has seen.
    """
    if len(conversation.starts) <= turns:
        return False
    first = conversation.starts[-turns]
    moved = first - conversation.head
    conversation.ids = conversation.ids[: conversation.head] + conversation.ids[first:]
    conversation.starts = [start - moved for start in conversation.starts[-turns:]]
    conversation.node = tree.attach(conversation.ids, conversation.agent)
    return moved > 0


def begin_anew(
    conversation: Conversation, bridge: Bridge, tree: Tree, summary: str, messages: Sequence[Message]
) -> Conversation:
    """The conversation that goes on from a summary: its beginning, the summary, and the newest messages."""
    content = "\n\n".join([SUMMARY_INTRODUCTION + summary, *(m["content"] for m in messages)])
    head = conversation.head_messages
    start = [*head, {"role": "user", "content": content}]
    if head and head[-1]["role"] == "user":  # templates may want the roles to take turns
        start = [*head[:-1], head[-1] | {"content": head[-1]["content"] + "\n\n" + content}]
    return replace(begin(bridge, tree, conversation.agent, start, conversation.tools), head_messages=head)


def clip(messages: Sequence[Message], limit: int, tokenizer: Any) -> list[Message]:
    """Messages of at most about `limit` tokens each: the middle of a longer one is cut out, which is said. 0: all."""
    clipped = []
    for message in messages:
        ids = tokenizer(message["content"], add_special_tokens=False)["input_ids"] if limit else []
        if len(ids) > limit > 0:
            front, back = ids[: limit - limit // 2], ids[len(ids) - limit // 2 :]
            notice = CUT.format(count=len(ids) - limit)
            text = tokenizer.decode(front) + notice + (tokenizer.decode(back) if back else "")
            message = message | {"content": text}
        clipped.append(message)
    return clipped


def room(conversation: Conversation, env: EnvConfig, max_model_len: int) -> int:
    """Tokens that the next turn may have."""
    return (env.context_tokens or max_model_len) - len(conversation.ids)


def wants_room(env: EnvConfig, free: int, max_tokens: int) -> bool:
    """Whether something must leave the context before the next turn."""
    return env.context is not Context.stop and free < max_tokens
