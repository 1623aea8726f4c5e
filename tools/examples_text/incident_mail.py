"""The incident `mail`: a relay without disk."""

from __future__ import annotations

from examples_text.incident_data import Deploy, Hypothesis, Incident, Logs, Look, Metric

MAIL = Incident(
    "mail",
    551,
    "Alert: queue depth of mail-worker above 50,000. Customers do not get their confirmation mails since "
    "some time after nine this morning, and a few got theirs twice. The workers are all up and look "
    "green. Can you find out what is going on?",
    "order-service -> queue -> mail-worker (8 instances) -> (template-service, Postgres customers, SMTP "
    "relay). A job is acknowledged after the relay has accepted the mail; without that it is delivered "
    "again after 120 seconds.",
    Logs(
        "mail-worker",
        "warning",
        (
            "job {id} attempt 3: not acknowledged within 120 s, returned to the queue",
            "job {id} attempt 2: not acknowledged within 120 s, returned to the queue",
            "job {id} smtp relay-2: connect took {ms} ms",
        ),
        lines=16,
        more=9120,
        low_ms=29000,
        high_ms=31000,
    ),
    Metric("mail-worker", "queue_depth", "jobs", 240, 58400, 552, gradual=True, every=5),
    (
        Hypothesis(
            "One of the two SMTP relays does not answer",
            "connections to that relay that end in a timeout, and about half of all mails going through",
            "both relays accepting mails at the same pace",
            Logs(
                "mail-worker",
                "info",
                (
                    "job {id} smtp relay-1: 250 accepted in {ms} ms",
                    "job {id} smtp relay-2: connect timeout after 30000 ms, trying again",
                    "job {id} smtp relay-2: connect timeout after 30000 ms, trying again",
                ),
                lines=14,
                more=2204,
                low_ms=60,
                high_ms=210,
            ),
            Metric("mail-worker", "accepted_relay_2_per_minute", "mails", 310, 0, 553, every=5),
            "relay-1 accepts mails in 60 to 210 ms. relay-2 has accepted none since 09:13; every "
            "connection to it runs into the timeout of 30 seconds. With up to four tries that is 120 "
            "seconds, exactly the time after which the queue delivers the job again. That explains the "
            "depth and the doubled mails.",
            (
                Look(
                    "Now I would like to know why relay-2 does not answer, and look at its own log.",
                    Logs(
                        "smtp-relay-2",
                        "error",
                        (
                            "accept4: too many open files",
                            "cannot open spool/{id}: no space left on device",
                            "queue run: {n} messages deferred, disk is full",
                        ),
                        decisive="/var/spool is 100 % full (40.0 of 40.0 GiB), 1204771 files in deferred",
                    ),
                    "The disk of relay-2 is full: 40 of 40 GiB, 1.2 million deferred files. A relay "
                    "without disk accepts nothing. The mechanism is complete, I am 95 % sure. The "
                    "smallest action is to take relay-2 out of the list of the workers, which relay-1 "
                    "can carry alone.",
                ),
                Look(
                    "Was anything changed around nine that touches the relays?",
                    (
                        Deploy("07:45", "template-service", "1.9.3", "New footer for the spring campaign"),
                        Deploy("08:58", "order-service", "8.3.1", "Send the confirmation before the invoice"),
                        Deploy("09:05", "smtp-relay-2", "config", "Keep bounced mails for 30 days, not 3"),
                    ),
                    "At 09:05 relay-2 was told to keep bounced mails for 30 days instead of 3. That "
                    "fills a disk, and eight minutes later it accepts nothing. It was changed on relay-2 "
                    "only, which is why relay-1 is well. I would take relay-2 out of the list, then undo "
                    "the setting.",
                ),
            ),
        ),
        Hypothesis(
            "Rendering has become slow with the new footer",
            "template-service taking seconds for each mail since its last deploy at 07:45",
            "rendering times that have not moved between 07:30 and now",
            Logs(
                "template-service",
                "info",
                (
                    "render confirmation/{user} lang=en in {ms} ms",
                    "render confirmation/{user} lang=fr in {ms} ms",
                    "render invoice/{user} lang=en in {ms} ms",
                ),
                lines=14,
                more=88,
                low_ms=11,
                high_ms=48,
            ),
            Metric("template-service", "render_p95", "ms", 39, 41, 560, every=5),
            "Rendering takes 11 to 48 ms, and the 95th percentile is 40 ms throughout. The deploy at "
            "07:45 is an hour and a half too early as well. This is ruled out as far as the average goes.",
            (
                Look(
                    "To be sure I look for failures that would not show up in the times.",
                    Logs(
                        "template-service",
                        "warning",
                        (
                            "partial footer-spring not found for lang=pl, using lang=en",
                            "image {id}.png is larger than 200 kB",
                        ),
                        lines=7,
                    ),
                    "There are only cosmetic warnings: a Polish footer is missing and some images are "
                    "large. Nothing that would stop a mail. I close this hypothesis; new evidence would "
                    "be failed renders.",
                ),
                Look(
                    "I check whether the workers wait for it: how busy are they?",
                    Metric("mail-worker", "cpu", "percent of one core", 22, 3, 553, every=5),
                    "The workers have become idle: from 22 % of a core to 3 % at 09:13. They wait for "
                    "something else than rendering, which would keep them or template-service busy. "
                    "Waiting without working is what a network timeout looks like, so the relays should "
                    "be next.",
                ),
            ),
        ),
    ),
    ("The customers database is locked: expect workers that wait in SQL; ruled out if queries are fast.",),
    "Since 09:13 UTC about half of the mails are stuck, the queue holds 58,000 jobs, and some customers "
    "get the same mail twice. The reason is smtp-relay-2: it accepts nothing because its disk is full. "
    "At 09:05 it was told to keep bounced mails for 30 days. Workers wait up to 120 seconds for it, and "
    "then the job is delivered again. Now: take relay-2 out of the workers' list; relay-1 alone can send "
    "900 a minute, so the backlog is gone in about an hour. Then undo the setting and empty the spool. "
    "Tomorrow: an alert on the disks of the relays, and a time limit for each job that is well below 120 "
    "seconds.",
)
