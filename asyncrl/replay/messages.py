"""What clients ask of the replay server and what it answers. Plain msgspec Structs; `wire.py` turns them into bytes.

Every request is idempotent: it is identified by (incarnation, seq), and a repeated one gets the reply it got before.
A request that cannot be answered yet is parked; `Again` asks after it and is answered with `Parked` and the reason.
"""

from __future__ import annotations

from math import nan
from typing import Annotated, Any

import msgspec

from asyncrl.types import Prompt

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Version = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, kw_only=True, tag=True):
    """Base: keyword-only, tagged with its class name."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one group lies: in a segment of the journal or, with an `owner`, in one of a generator."""

    segment: Count
    offset: Count
    length: Count
    owner: Name = ""
    """Incarnation of the generator."""
    header: Count = 0
    """Bytes of its first frame."""
    digests: list[bytes] = []
    """Of its frames."""


class Offer(msgspec.Struct, frozen=True):
    """The server's folder for groups, for processes on its host."""

    folder: str
    token: str
    """What the file `token` in it says."""
    boot: str
    """The kernel's name for this boot of the machine."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to generate one group."""

    id: int
    prompt: Prompt
    version: int
    """Live on the generators when it was granted: no token of the group may be older."""
    attempt: int
    """How often the prompt was leased before."""


# Requests


class Hello(_Message):
    """First request of every process. A generator takes the place of a former one with its index, once that is dead or
    silent: parked until this is known, refused when it lives."""

    pid: Count = 0
    host: Name = ""
    run: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)] = {}
    """`fingerprint` of its configuration; nothing: it only looks on."""


class AskLease(_Message):
    """Parked until at least one lease can be granted; answered with Leases."""

    n: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class Insert(_Message):
    """The group of a lease, in the payload frames or in a file; answered with Done."""

    lease_id: Count
    place: Place | None = None
    full: Annotated[list[Count], msgspec.Meta(max_length=1 << 12)] = []
    """Segments of the sender all of whose groups have been answered for: which of them can be written over?"""


class Drop(_Message):
    """A lease ends without a group; answered with Done."""

    lease_id: Count
    reason: Annotated[str, msgspec.Meta(pattern="^[a-z_]{1,40}$")]
    num_tokens: Count = 0
    reward: float = nan
    length: float = nan
    why: Text = ""
    """The reason in full, as the environment's error says it; the last of each reason is shown."""


class Heartbeat(_Message):
    """I am alive and still work on `held`; renews those leases, and frees granted ones that are missing from it.

    Answered with Done, which says False once the run is finished.
    """

    activity: Annotated[dict[Name, float], msgspec.Meta(max_length=64)]
    held: Annotated[list[Count], msgspec.Meta(max_length=1 << 16)] = []
    waits: Text = ""
    """What this process waits for that is not asked of this server, and why; shown by `asyncrl status`."""


class Beat(_Message):
    """A trainer rank lives, and for `for_s` it `does` the same; answered with Missing.

    It says anew who it is: this server may have been started after it.
    """

    size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    """Ranks of this trainer."""
    pid: Count
    host: Name
    does: Name = ""
    for_s: float = 0.0


class Lookup(_Message):
    """Parked until somebody announced `key`; answered with Value."""

    key: Name


class Announce(_Message):
    key: Name
    value: Text


class Take(_Message):
    """The groups of optimiser step `step`, trained at `version`; answered with Taken and the groups' frames."""

    step: Count
    num_groups: Count
    version: Version
    by_place: bool = False
    """The sender sees the server's folder: of groups that lie there it wants the places alone."""


class Publish(_Message):
    """`version`, made by training `step`, is live on the generators."""

    version: Version
    step: Count


class Rewind(_Message):
    """The trainer resumes from the checkpoint of `step` (0: from the start); what was used later is available again."""

    step: Count
    version: Version


class Forget(_Message):
    """No checkpoint older than `step` is kept: groups consumed up to it can be removed from disk."""

    step: Count


class Finish(_Message):
    """No more leases."""

    reason: Text


class Status(_Message):
    """Who waits for whom; answered with Report."""


class Leave(_Message):
    """This process ends; its leases are free at once."""


class Again(_Message):
    """Has the request with this envelope's `seq` been answered? Sent instead of repeating a payload."""


Request = (
    Hello
    | AskLease
    | Insert
    | Drop
    | Heartbeat
    | Beat
    | Lookup
    | Announce
    | Take
    | Publish
    | Rewind
    | Forget
    | Finish
    | Status
    | Leave
    | Again
)


# Replies


class Welcome(_Message):
    """`version`: live on the generators, -1 before the first publish."""

    run: str
    version: int
    announced: dict[str, str]
    offer: Offer | None = None


class Leases(_Message):
    """Empty: the run is finished."""

    leases: list[Lease]


class Done(_Message):
    """False: the lease had expired, the group or drop was ignored; to a heartbeat, the run is finished."""

    accepted: bool = True
    unused: list[int] = []
    """Of the segments that were asked about, those to which nothing refers."""


class Missing(_Message):
    """The trainer's ranks that are not heard from, in one line; "" when all are."""

    why: str = ""
    for_s: float = 0.0
    """How long the others have not got on, and these have been silent."""


class Value(_Message):
    value: str


class Taken(_Message):
    """Followed by 2 frames per group without a place. No groups: the data has ended."""

    num_groups: int
    version: int
    metrics: dict[str, float]
    places: list[Place | None] = []
    """One per group; none when no group has one."""


class Report(_Message):
    status: dict[str, Any]


class Parked(_Message):
    """Not yet, and why."""

    diagnosis: str


class Resend(_Message):
    """The request is not known here (a restarted server, a lost connection) or could not be read: send it in full."""

    fault: str = ""
    """What was wrong with it, when it could not be read."""


class Refused(_Message):
    """The request makes no sense here; `message` says what to do."""

    message: str
    fatal: bool = False
    """An invariant broke and the server ends: RuntimeError at the client, instead of ValueError."""
    no_place: bool = False
    """Another process has the sender's place: NoPlace at the client."""


Reply = Welcome | Leases | Done | Missing | Value | Taken | Report | Parked | Resend | Refused
