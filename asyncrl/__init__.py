"""asyncrl: asynchronous off-policy reinforcement learning for language models.

`import asyncrl` is light: it imports neither torch nor vLLM. The names below are all that a custom environment or
algorithm needs.
"""

from asyncrl.algorithm import Algorithm, Needs
from asyncrl.env import Conversation, Env, Generate
from asyncrl.registry import register_algo, register_env
from asyncrl.types import Batch, Completion, Episode, Group, Message, Prompt, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "Batch",
    "Completion",
    "Conversation",
    "Env",
    "Episode",
    "Generate",
    "Group",
    "Message",
    "Needs",
    "Prompt",
    "SamplingParams",
    "register_algo",
    "register_env",
]
