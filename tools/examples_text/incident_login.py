"""The incident `login`: a cache full of counters."""

from __future__ import annotations

from examples_text.incident_data import Deploy, Hypothesis, Incident, Logs, Look, Metric

LOGIN = Incident(
    "login",
    1190,
    "Alert: p99 of auth-service above 4 s. People are being logged out and have to log in again, some of "
    "them every minute or two. It is 20:30 now and it got bad quite suddenly about twenty minutes ago. "
    "The evening peak starts in half an hour, so I'd like to have this fixed by then.",
    "gateway -> auth-service (6 instances) -> (Redis sessions: 3 nodes, Postgres users). A session that "
    "is not in Redis is created again from the refresh token, which means one bcrypt check, about 250 ms "
    "of a core.",
    Logs(
        "auth-service",
        "warning",
        (
            "session {id} not found in redis, refreshing user={user}",
            "session {id} not found in redis, refreshing user={user}",
            "bcrypt queue is {n} deep, user={user} waited {ms} ms",
        ),
        lines=16,
        more=20417,
        low_ms=1800,
        high_ms=4600,
    ),
    Metric("auth-service", "p99", "ms", 180, 4350, 1210),
    (
        Hypothesis(
            "Redis throws sessions away because it is full",
            "evictions on the session nodes since 20:10, with the memory at its limit",
            "no evictions, or memory well below the limit",
            Logs(
                "redis-sessions-2",
                "info",
                (
                    "used_memory 11.99G maxmemory 12.00G policy allkeys-lru evicted {n}",
                    "slowlog: EVALSHA rate_limit {ms} us",
                    "client auth-service-{conn} cmd=SETEX key=sess:{id}",
                ),
                lines=14,
                more=733,
                low_ms=800,
                high_ms=2400,
            ),
            Metric("redis-sessions", "evicted_keys_per_minute", "keys", 0.0, 8840, 1209),
            "There were no evictions at all until 20:09 and nearly 9,000 keys a minute from then on, "
            "with the memory at 11.99 of 12 GiB. Sessions are thrown away while people still use them. "
            "The hypothesis holds; what is missing is what has filled the memory.",
            (
                Look(
                    "I look at which kinds of keys are in there.",
                    Logs(
                        "redis-sessions-2",
                        "debug",
                        (
                            "bigkeys sample: prefix sess: {n} % of keys, mean 410 bytes, ttl 1800 s",
                            "bigkeys sample: prefix rl: {n} % of keys, mean 96 bytes, ttl none",
                        ),
                        decisive="memory by prefix: rl: 7.9 GiB, 61 million keys, no ttl; sess: 3.6 GiB",
                        lines=9,
                    ),
                    "Two thirds of the memory are keys of the rate limiter (prefix rl:), 61 million of "
                    "them, and they have no time to live, so they never go away by themselves. The "
                    "sessions need only 3.6 GiB. The rate limiter has filled the memory, and the "
                    "eviction hits the sessions too.",
                ),
                Look(
                    "Something must have started to write more. I look at the deploys and settings of today.",
                    (
                        Deploy("11:30", "auth-service", "3.7.2", "Translate the error page"),
                        Deploy("16:52", "gateway", "9.1.0", "Rate limit by address and path, not address"),
                        Deploy("19:20", "user-service", "4.4.0", "Show the last login on the profile page"),
                    ),
                    "At 16:52 the gateway began to count by address and path, which makes many more "
                    "keys, and it keeps its counters in the same Redis as the sessions. Three hours "
                    "later the memory is full. That is a mechanism: 85 %. A rollback of the gateway "
                    "stops the growth, but the keys that are there have to be deleted, or they stay.",
                ),
            ),
        ),
        Hypothesis(
            "An attack tries passwords in bulk",
            "many failed logins, from few addresses or against few accounts",
            "a share of failed logins that is the usual one",
            Logs(
                "auth-service",
                "info",
                (
                    "refresh user={user} ok in {ms} ms",
                    "refresh user={user} ok in {ms} ms",
                    "refresh user={user} ok in {ms} ms",
                    "refresh user={user} ok in {ms} ms",
                    "refresh user={user} ok in {ms} ms",
                    "login user={user} ok in {ms} ms",
                    "login user={user} ok in {ms} ms",
                    "login user={user} wrong password in {ms} ms",
                ),
                lines=14,
                more=15260,
                low_ms=900,
                high_ms=4400,
            ),
            Metric("auth-service", "failed_login_share", "percent", 6.1, 5.8, 1230),
            "The share of failed logins is about 6 %, before and after. What has gone up is the number "
            "of refreshes, and they succeed: these are real people with real tokens, whose sessions are "
            "gone. An attack does not look like this.",
            (
                Look(
                    "One more look, at where the requests come from.",
                    Logs(
                        "gateway",
                        "info",
                        (
                            "top networks of the last minute: 3.1 % 2.8 % 2.2 % 1.9 % (total {user})",
                            "rate limit hit: {n} requests refused in the last minute",
                        ),
                        lines=8,
                    ),
                    "No network has more than 3 % of the requests, and the rate limit refuses a few "
                    "dozen a minute, as on any evening. I close this hypothesis. New evidence would be a "
                    "network above 20 %.",
                ),
                Look(
                    "If real people lose their sessions, then sessions must disappear. How many are there?",
                    Metric("redis-sessions", "session_keys", "thousand keys", 8410, 2960, 1209, gradual=True),
                    "The number of sessions falls since 20:09, from 8.4 million towards 3 million, "
                    "although nobody has logged out. Redis loses them, so the next thing to look at is "
                    "its memory and its evictions. I close the hypothesis of an attack.",
                ),
            ),
        ),
    ),
    ("The instances are too few for the evening: expect high CPU before 20:09; ruled out if it was low.",),
    "Since 20:09 UTC sessions disappear from Redis, and everyone who loses one costs auth-service 250 ms "
    "of a core, so logins take more than four seconds. Redis is full because the rate limiter of the "
    "gateway (9.1.0, since 16:52) counts by address and path and never lets a counter expire: 61 million "
    "keys, 7.9 GiB. Now: roll the gateway back to 9.0, then delete the keys with the prefix rl: in small "
    "steps, which is safe because they are only counters. Do not restart Redis, that would log out "
    "everyone. Tomorrow: counters with a time to live, and a Redis of their own.",
)
