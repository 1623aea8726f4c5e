"""What can be wrong with a service: each fault with its traces, its mechanism, and what is done about it.

`<name>` stands for something of the world, `{ms}` and the like for a draw of each log line. `<line>` is the line that
decides; `<before>`, `<till>`, `<after>`, `<from>`, `<last>`, `<until>`, `<unit>` are values and minutes of the metric.
Must not know: how the search is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from conversations.incidents.world import Level


@dataclass(frozen=True)
class Fault:
    """One possible cause, and what is seen of it.

    part is the role of the service that shows it; symptoms are lines of the victim; traces and decisive are lines of
    the part if it is the cause, calm if it is not. guilty is the role of the service whose change caused it, "" if no
    change did. because is the cause in the summary, after "because".
    """

    title: str
    expect: str
    ruled_out: str
    part: str
    symptoms: tuple[str, ...]
    alarm: Level
    level: str
    traces: tuple[str, ...]
    decisive: str
    calm: tuple[str, ...]
    measure: Level
    found: tuple[str, ...]
    guilty: str
    kind: str
    change: str
    mechanism: str
    because: str
    now: str
    risk: str
    tomorrow: str


TIMEOUTS = Level("error_rate", "percent", (0.1, 0.6), (4.0, 19.0))
SLOW = Level("p99", "ms", (90, 380), (1900, 4800))
FEWER = Level("requests_ok_per_minute", "requests", (300, 2400), (12, 90))

INDEX = Fault(
    "[A slow query holds the connections|A query reads a whole table]",
    "slow statements in <database>",
    "[an empty slow query log|a slow query log as short as ever]",
    "database",
    (
        "GET /<subject>s/{user} req={id} failed after 3000 ms: no connection from the pool",
        "GET /<subject>s req={id} status=503 pool in use, waiting {n}",
        "POST /<subject>s req={id} status=503 after 3000 ms, retried once",
    ),
    TIMEOUTS,
    "warning",
    (
        "duration: {ms} ms statement: SELECT * FROM <table> WHERE <column> = $1 (conn {conn})",
        "duration: {ms} ms statement: SELECT * FROM <table> WHERE <column> = $1 (conn {conn})",
        "process {user} still waiting for ShareLock on <table>",
    ),
    "plan: Seq Scan on <table> (rows={user}{user})",
    ("checkpoint complete, wrote {n} buffers", "autovacuum of <table>: {n} pages", "statistics of <table> written"),
    Level("rows_read_per_second", "thousand rows", (20, 60), (1400, 3200)),
    (
        "One statement, the lookup in <table> by <column>, [is slow each time|takes seconds], and the rows read per "
        "second go from <before> to <after> thousand at <from>. The table is read from end to end, so an index is "
        "missing.",
        'The expectations are met: "<line>". The rows read went from <before> thousand at <till> to <after> '
        "thousand at <from>. There is no index on <column>.",
    ),
    "victim",
    "version",
    "Migration <migration>: add <column> to <table>",
    "Version <version> of <victim> brought the column <column> at <guilty_at>, and nothing says that it has an index. "
    "That is a mechanism. I am about 90 % sure.",
    "<column> in <table> has no index since migration <migration>",
    "roll <victim> back to the version before <version>",
    "[rows written meanwhile lack the column|none is known, the old column is still there]",
    "compare query plans on a copy of the real table before a migration",
)

LEAK = Fault(
    "[<victim> leaks memory|The memory of <victim> runs full]",
    "[memory that only grows, and restarts|growing memory and killed instances]",
    "[flat memory|memory that stays level]",
    "victim",
    (
        "upstream closed the connection while <victim> answered req={id}",
        "GET /<subject>s/{user} req={id} status=502 after {ms} ms",
        "instance {conn} is not ready, request req={id} sent elsewhere",
    ),
    TIMEOUTS,
    "error",
    (
        "garbage collection took {ms} ms, freed {n} MB",
        "heap is {n} MB below its limit",
        "instance {conn} started, cache is cold",
    ),
    "instance {conn} killed: out of memory, {n} requests lost",
    ("request body of req={id} is not valid JSON", "client of req={id} went away", "retry {n} of a message"),
    Level("memory_used", "percent", (38, 52), (94, 98), gradual=True),
    (
        "The memory rises from <before> percent at <till> to <last> percent at <until> without a pause, and the log "
        'says "<line>". [Both expectations are met|That is what I expected].',
        "Memory used was <before> percent at <till> and is <last> percent at <until>. Instances are killed and start "
        'again: "<line>". The hypothesis holds.',
    ),
    "victim",
    "version",
    "[Keep rendered <subject>s in memory|Cache <subject>s in the process]",
    "<victim> <version>, deployed at <guilty_at>, keeps <subject>s in memory, and nothing removes them. That explains "
    "the growth. 85 %.",
    "<victim> <version> keeps every <subject> in memory until the instance is killed",
    "roll <victim> back to the version before <version>",
    "pages are a little slower without the cache",
    "give the cache a limit and an alarm",
)

CERTIFICATE = Fault(
    "[The certificate of <provider> has expired|A certificate has expired]",
    "[failed handshakes in <adapter>|handshake errors in <adapter>]",
    "handshakes that succeed",
    "adapter",
    (
        "<adapter> answered 502 for req={id}",
        "<subject> {user} cannot be completed: <adapter> unavailable",
        "circuit to <adapter> open, {n} requests refused",
    ),
    FEWER,
    "error",
    (
        "TLS handshake with <provider> failed: certificate has expired",
        "TLS handshake with <provider> failed: certificate has expired",
        "call req={id} to <provider> given up after {n} tries",
    ),
    "peer certificate of <provider> not valid after today <at>",
    ("call req={id} to <provider> status=200 in {ms} ms", "call req={id} to <provider> status=200 in {ms} ms"),
    Level("handshake_failures_per_minute", "failures", (0, 0), (120, 900)),
    (
        'Every call to <provider> fails in the handshake: "<line>". There were <before> failures a minute until '
        "<till> and <after> from <from> on.",
        'The line that decides is "<line>". Handshake failures go from <before> to <after> a minute at <from>. '
        "[The hypothesis holds|It is the certificate].",
    ),
    "",
    "",
    "",
    "Nothing was deployed to <adapter>, so no change of ours did it. A certificate that ends at <at> fits exactly.",
    "the certificate of <provider> ended at <at>",
    "ask <provider> to renew it, and queue the <subject>s until then",
    "the queued <subject>s arrive late",
    "an alarm two weeks before a certificate ends",
)

DISK = Fault(
    "[The disk of <queue> is full|<queue> has no space left]",
    "[writes that fail on <queue>|failed writes and a full disk]",
    "free space on its disk",
    "queue",
    (
        "publish of <subject> {user} failed: broker refused the message",
        "publish retried {n} times, req={id}",
        "outbox has {user} messages, oldest {n} minutes",
    ),
    TIMEOUTS,
    "error",
    (
        "append to segment {user} failed: no space left on device",
        "append to segment {user} failed: no space left on device",
        "follower {conn} is behind by {user} messages",
    ),
    "log directory full, {n} MB of 500 GB left",
    ("segment {user} closed after {n} minutes", "consumer {conn} joined", "offsets committed in {ms} ms"),
    Level("disk_used", "percent", (71, 84), (99.6, 99.9)),
    (
        '<queue> cannot write: "<line>". Its disk was at <before> percent at <till> and is at <after> percent from '
        "<from> on. Both expectations are met.",
        'The disk is full: <after> percent at <from>, after <before> at <till>. The log agrees: "<line>".',
    ),
    "queue",
    "config",
    "[Keep messages for <large> days instead of 7|Raise the retention from 7 to <large> days]",
    "At <guilty_at> the retention of <queue> was raised to <large> days, so nothing is removed any more. That is a "
    "mechanism. 90 %.",
    "<queue> keeps messages for <large> days since <guilty_at>, and its disk is full",
    "set the retention back to 7 days",
    "messages older than 7 days are gone for good",
    "an alarm at 85 % of the disk",
)

TIMEOUT = Fault(
    "[A timeout was set too low|A setting of <victim> is wrong]",
    "[requests that end at the same time each|requests cut off after <large> ms]",
    "times that vary, and no change of settings",
    "victim",
    (
        "call to <other> req={id} cancelled after <large> ms",
        "GET /<subject>s/{user} req={id} status=504",
        "call to <other> req={id} cancelled after <large> ms, no retry left",
    ),
    TIMEOUTS,
    "info",
    (
        "req={id} <other> did not answer within <large> ms",
        "req={id} <other> did not answer within <large> ms",
        "req={id} answered from the cache in {n} ms",
    ),
    "settings loaded: other_timeout_ms=<large> (before: 3000)",
    ("req={id} answered in {ms} ms", "req={id} answered in {ms} ms", "req={id} answered from the cache in {n} ms"),
    Level("timeouts_per_minute", "timeouts", (1, 4), (210, 950)),
    (
        'The requests all end after <large> ms, and the log has "<line>". Timeouts went from <before> a minute at '
        "<till> to <after> at <from>. It is a setting.",
        '"<line>": the limit is lower than what <other> needs. There are <after> timeouts a minute since <from>, '
        "and there were <before> at <till>.",
    ),
    "victim",
    "config",
    "[Lower other_timeout_ms from 3000 to <large>|Set other_timeout_ms to <large>]",
    "The setting was changed at <guilty_at>: other_timeout_ms is <large> now. <other> needs longer than that for some "
    "requests. I am 95 % sure.",
    "other_timeout_ms of <victim> is <large> ms since <guilty_at>",
    "set other_timeout_ms back to 3000",
    "none, it is the value of yesterday",
    "have changes of timeouts go through the canary",
)

LIMIT = Fault(
    "[<provider> refuses our requests|Our quota at <provider> is used up]",
    "answers with status 429 in <adapter>",
    "[only status 200|no status 429]",
    "adapter",
    (
        "<subject> {user} stays pending: <adapter> says try later",
        "POST /<subject>s req={id} status=503, <adapter> busy",
        "retry {n} for <subject> {user}",
    ),
    SLOW,
    "warning",
    (
        "<provider> status=429 for req={id}, wait {n} s",
        "<provider> status=429 for req={id}, wait {n} s",
        "{user} requests waiting for <provider>",
    ),
    "<provider>: quota of {user} requests an hour is used up",
    ("certificate of <provider> ends in {n} days", "webhook req={id} arrived twice, ignored"),
    Level("requests_to_provider_per_minute", "requests", (80, 260), (1900, 5200)),
    (
        '<provider> answers 429, and the log says why: "<line>". We sent <before> requests a minute at <till> and '
        "<after> at <from>. So it is our own load.",
        'The requests to <provider> go from <before> to <after> a minute at <from>, and it refuses them: "<line>". '
        "[Both expectations are met|The hypothesis holds].",
    ),
    "client",
    "version",
    "[Check every <subject> again each hour|Refresh all <subject>s through <adapter>]",
    "<client> <version> asks for every <subject> again since <guilty_at>. That makes the extra requests. 90 %.",
    "<client> <version> asks <provider> for every <subject>, and the quota is used up",
    "roll <client> back, the quota recovers within the hour",
    "the <subject>s are checked once a day only",
    "a quota of its own for <client>",
)

FAULTS: tuple[Fault, ...] = (INDEX, LEAK, CERTIFICATE, DISK, TIMEOUT, LIMIT)
