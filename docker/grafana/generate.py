"""Write the dashboards beside this file: python docker/grafana/generate.py

Panels are said here in one line each; the JSON is for Grafana. A test keeps the two alike, and asks
every query of a live server.
"""

from __future__ import annotations

import json
from pathlib import Path

from panels import dashboard, gauge, number, panel, quantile, rate, stacked

HERE = Path(__file__).parent
ASKED = 'source=~"exact|near|computed"'

STAGE = "ctrlcache_stage_seconds"
PARTS = 'source="computed", stage!="total"'
HITS = rate("ctrlcache_answers_total", "instance", 'source=~"exact|near"')
ANSWERS = rate("ctrlcache_answers_total", "instance", ASKED)

SERVING = [
    number(
        "Ready",
        "1 while every model answers its canary; Triton's own health says less.",
        "min(ctrlcache_supervisor_ready)",
        "short",
        1,
    ),
    number(
        "Answers",
        "Per second, canaries included.",
        f"sum({rate('ctrlcache_answers_total', 'instance')})",
        "reqps",
    ),
    number(
        "Hit rate",
        "Of what was asked with cache=on.",
        f"sum({HITS}) / (sum({ANSWERS}) > 0)",
        "percentunit",
    ),
    number(
        "Median",
        "From arrival to reply.",
        quantile(0.5, STAGE, "stage", f'stage="total", {ASKED}'),
        "s",
    ),
    number(
        "99th percentile",
        "From arrival to reply.",
        quantile(0.99, STAGE, "stage", f'stage="total", {ASKED}'),
        "s",
    ),
    number("Sessions", "Alive now.", gauge("ctrlcache_sessions", "instance"), "short"),
    panel(
        "Latency by where the answer came from",
        "From arrival to reply. exact, near: from the cache; computed: after a miss.",
        [
            (quantile(0.5, STAGE, "source", f'stage="total", {ASKED}'), "{{source}} p50"),
            (quantile(0.99, STAGE, "source", f'stage="total", {ASKED}'), "{{source}} p99"),
        ],
        "s",
        width=12,
        scaleDistribution={"type": "log", "log": 10},
    ),
    stacked(
        "Where the time of a computed answer goes",
        "Mean of each stage. What is missing up to the median above is waiting.",
        [
            (
                f"{rate(STAGE + '_sum', 'stage', PARTS)}"
                f" / ({rate(STAGE + '_count', 'stage', PARTS)} > 0)",
                "{{stage}}",
            )
        ],
        "s",
        width=12,
    ),
    stacked(
        "Answers",
        "By source; bypass: cache=off or refresh, none: nothing was to be predicted.",
        [(rate("ctrlcache_answers_total", "source"), "{{source}}")],
        "reqps",
    ),
    panel(
        "Hit rate",
        "Of what was asked with cache=on.",
        [(f"{HITS} / ({ANSWERS} > 0)", "{{instance}}")],
        "percentunit",
    ),
    panel(
        "Computing time saved",
        "Seconds of computing that hits made unnecessary, per second.",
        [(rate("ctrlcache_saved_seconds_total", "instance"), "{{instance}}")],
        "s",
    ),
    panel(
        "Refused",
        "Requests that got an error, by reason.",
        [(rate("ctrlcache_refused_total", "reason"), "{{reason}}")],
        "reqps",
    ),
    panel(
        "Sessions",
        "Alive, and how many may be.",
        [
            (gauge("ctrlcache_sessions", "instance"), "{{instance}}"),
            (gauge("ctrlcache_sessions_limit", "instance"), "{{instance}} limit"),
        ],
    ),
    panel(
        "Waiting in Triton",
        "Requests that the server has not handed to an instance yet.",
        [(gauge("nv_inference_pending_request_count", "model", fold="sum"), "{{model}}")],
    ),
    panel(
        "Since the last heartbeat",
        "A dead or stopped process of a model grows without end.",
        [
            (
                "time() - " + gauge("ctrlcache_heartbeat_seconds", "model_instance"),
                "{{model_instance}}",
            )
        ],
        "s",
    ),
    panel(
        "Canaries",
        "How long the slowest canary of a round took, 99th percentile.",
        [
            (
                "histogram_quantile(0.99, sum by (model, le) "
                "(rate(ctrlcache_supervisor_canary_seconds_bucket[$__rate_interval])))",
                "{{model}}",
            )
        ],
        "s",
    ),
    panel(
        "Lost and brought back",
        "Models found dead or hung, and recoveries by how.",
        [
            ("sum by (model) (ctrlcache_supervisor_losses_total)", "{{model}} lost"),
            ("sum by (model, how) (ctrlcache_supervisor_recoveries_total)", "{{model}} {{how}}"),
        ],
    ),
]

CACHE = [
    panel(
        "Look-ups",
        "By tier and result.",
        [(rate("ctrlcache_lookups_total", "tier, result"), "{{tier}} {{result}}")],
        "ops",
    ),
    panel(
        "Time of a look-up",
        "Promised at the 99th percentile: 50 µs hot, 1.2 ms warm.",
        [
            (quantile(0.5, "ctrlcache_lookup_seconds", "tier"), "{{tier}} p50"),
            (quantile(0.99, "ctrlcache_lookup_seconds", "tier"), "{{tier}} p99"),
        ],
        "s",
        scaleDistribution={"type": "log", "log": 10},
    ),
    panel("Records", "In each tier.", [(gauge("ctrlcache_entries", "tier"), "{{tier}}")]),
    panel(
        "How full the tiers are",
        "Of the bytes each may hold. A warm tier at 100 % is in good order: it evicts.",
        [
            (
                f"{gauge('ctrlcache_bytes', 'tier')} / {gauge('ctrlcache_limit_bytes', 'tier')}",
                "{{tier}}",
            )
        ],
        "percentunit",
    ),
    panel(
        "Room left",
        "On the file system of the warm tier and in shared memory.",
        [
            (
                f"{gauge('ctrlcache_free_bytes', 'place', fold='min')}"
                f" / {gauge('ctrlcache_space_bytes', 'place')}",
                "{{place}}",
            )
        ],
        "percentunit",
    ),
    panel(
        "Evictions",
        "By tier and reason.",
        [(rate("ctrlcache_evictions_total", "tier, reason"), "{{tier}} {{reason}}")],
        "ops",
    ),
    stacked(
        "Admissions",
        "Couplets by what was decided.",
        [(rate("ctrlcache_admissions_total", "decision"), "{{decision}}")],
        "ops",
    ),
    panel(
        "Scoring",
        "Median time; it is done after the reply.",
        [(quantile(0.5, "ctrlcache_score_seconds", "score"), "{{score}}")],
        "s",
    ),
    panel(
        "Calibration",
        "1 where approximate answers can be given; and changes of a device's calibration.",
        [
            (gauge("ctrlcache_calibrated", "instance", fold="min"), "calibrated"),
            (
                "60 * " + rate("ctrlcache_calibration_epochs_total", "instance"),
                "new epochs a minute",
            ),
        ],
    ),
    panel(
        "True error of approximate answers",
        "Relative state error, on sampled recomputations.",
        [
            (quantile(0.5, "ctrlcache_hit_error", "instance"), "p50"),
            (quantile(0.95, "ctrlcache_hit_error", "instance"), "p95"),
        ],
        "percentunit",
    ),
    panel(
        "Error bounds",
        "Sampled recomputations by whether the stated bound held; at most 5 % may be violated.",
        [(gauge("ctrlcache_bound_checks_total", "result", fold="sum"), "{{result}}")],
    ),
    panel(
        "Damaged records and failed writes",
        "Since the start. Damage is a miss, never a wrong answer.",
        [
            (gauge("ctrlcache_corrupt_total", "tier", fold="sum"), "damaged: {{tier}}"),
            (gauge("ctrlcache_tier_failures_total", "instance", fold="sum"), "failed writes"),
        ],
    ),
    panel(
        "Object store",
        "Requests by result.",
        [(rate("ctrlcache_cold_requests_total", "result"), "{{result}}")],
        "ops",
        width=12,
    ),
]

FEATURES = rate("worldcache_lookups_total", "instance")
FOUND = rate("worldcache_lookups_total", "instance", 'result="hit"')
BLOCKS = rate("worldcache_blocks_total", "instance")
REUSED = rate("worldcache_blocks_total", "instance", 'decision="reused"')

WORLDCACHE = [
    panel(
        "Features found",
        "Share of the features asked for that a level had.",
        [(f"{FOUND} / ({FEATURES} > 0)", "{{instance}}")],
        "percentunit",
    ),
    stacked(
        "Features asked for",
        "By the level that had them; none: encoded anew.",
        [(rate("worldcache_lookups_total", "level"), "{{level}}")],
        "ops",
    ),
    stacked(
        "Bytes kept",
        "In each level, of all instances: l1 as they are, l2 packed, l3 on disk.",
        [(gauge("worldcache_store_bytes", "level", fold="sum"), "{{level}}")],
        "bytes",
    ),
    panel(
        "Features evicted",
        "From l1 into l2, and out of l2.",
        [(rate("worldcache_evictions_total", "level"), "{{level}}")],
        "ops",
    ),
    stacked(
        "Generator blocks",
        "Computed, and reused from an earlier step; only with more than one step.",
        [(rate("worldcache_blocks_total", "decision"), "{{decision}}")],
        "ops",
    ),
    panel(
        "Blocks reused",
        "Share of the generator's blocks that reuse left out.",
        [
            (
                f"{REUSED} / clamp_min({BLOCKS}, 1e-9)",
                "{{instance}}",
            )
        ],
        "percentunit",
    ),
    panel(
        "Loaded ahead",
        "Features and answers warmed up for a prompt, by how it was chosen.",
        [(rate("worldcache_warmed_total", "how"), "{{how}}")],
        "ops",
    ),
    panel(
        "Thinking that was lost",
        "Scores and prefetches that were not done: no room among what waits, or not possible.",
        [(rate("ctrlcache_background_lost_total", "reason"), "{{reason}}")],
        "ops",
    ),
]

DASHBOARDS = {
    "serving.json": dashboard(
        "ctrlcache-serving",
        "CtrlCache: serving",
        "What users feel, and whether the models live.",
        SERVING,
    ),
    "cache.json": dashboard(
        "ctrlcache-cache", "CtrlCache: cache", "Tiers, trust and what is stored.", CACHE
    ),
    "worldcache.json": dashboard(
        "ctrlcache-worldcache",
        "CtrlCache: WorldCache",
        "Features across generations, reuse within them, and thinking time.",
        WORLDCACHE,
    ),
}


def text_of(name: str) -> str:
    return json.dumps(DASHBOARDS[name], indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (HERE / "dashboards" / name).write_text(text_of(name))
