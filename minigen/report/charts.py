"""Charts of a run as Vega specifications: data and marks, which the page's Vega draws.

Colours are the page's own (CSS variables), so that the charts follow its light and dark dress.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import altair as alt
import vl_convert

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

VERSION = vl_convert.get_vegalite_versions()[-1]  # of Vega-Lite, and so of Vega
KINDS = ("vowel", "consonant", "digit", "punctuation or space", "other byte", "learned merge")
_KIND_COLORS = [f"var(--kind-{number})" for number in range(len(KINDS))]


@cache
def bundle() -> str:
    """Return the JavaScript that draws the charts: Vega behind the global ``vegaEmbed``."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)
    return bundle


def _over(values: Rows) -> Any:
    data = alt.Data(values=[dict(row) for row in values])  # type: ignore[no-untyped-call]
    return alt.Chart(data)


def _compiled(chart: Any, height: int, top: int = 2) -> Spec:
    padding = {"left": 2, "top": top, "right": 2, "bottom": 2}
    chart = (
        chart.properties(
            width="container", height=height, padding=padding, background="transparent"
        )
        .configure(font="system-ui, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor="var(--muted)",
            titleColor="var(--muted)",
            gridColor="var(--line)",
            domainColor="var(--line)",
            tickColor="var(--line)",
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
        )
        # Room for the longest numbers: it is measured once, and units and data change later.
        .configure_axisY(minExtent=34)
    )
    spec: Spec = vl_convert.vegalite_to_vega(chart.to_dict(validate=False), vl_version=VERSION)
    return spec


def _steps(steps: int, field: str = "step:Q") -> Any:
    scale = alt.Scale(domain=[0, steps], nice=False)
    return alt.X(field, title="step", scale=scale, axis=alt.Axis(tickCount=6, grid=False))


def _shown() -> Any:
    scale = alt.Scale(zero=False)
    return alt.Y("shown:Q", title=None, scale=scale, axis=alt.Axis(tickCount=6))


def _losses(rows: Rows, field: str, factor: str) -> Any:
    """Chart of one loss over steps; the page's signal ``factor`` turns nats into its unit."""
    values = [{"step": row["step"], "loss": row[field]} for row in rows if field in row]
    return _over(values).transform_calculate(shown=f"datum.loss * {factor}")


def _lines(lines: Mapping[str, float], factor: str, color: str, align: str, x: str) -> list[Any]:
    """Dashed lines at nats a token times the signal ``factor``, each with its name at ``x``."""
    if not lines:
        return []
    known = _over([{"name": name, "loss": nats} for name, nats in lines.items()])
    known = known.transform_calculate(shown=f"datum.loss * {factor}")
    rules = known.mark_rule(color=color, strokeDash=[4, 4], aria=False).encode(y=_shown())
    lowest = f"datum.name === '{min(lines, key=lines.__getitem__)}'"  # its name goes below it
    names = [
        known.transform_filter(which)
        .mark_text(
            color=color,
            align=align,
            baseline=side,
            dx=-2,
            dy=dy,
            fontSize=12,
            x=alt.ExprRef(x),
        )
        .encode(y=_shown(), text="name:N")
        for which, side, dy in ((f"!({lowest})", "bottom", -3), (lowest, "top", 4))
    ]
    return [rules, *names]


def loss(
    rows: Rows, steps: int, lines: Mapping[str, float], validation_lines: Mapping[str, float]
) -> Spec:
    """Training and validation loss over steps, each with lines to compare with.

    Lines are name → nats a token of either text. Signals ``training_unit`` and
    ``validation_unit`` multiply what is in nats per token.
    """
    x, y = _steps(steps), _shown()
    training = _losses(rows, "loss", "training_unit")
    every = max(1, len(rows) // 120)
    batches = training.mark_line(color="var(--training)", opacity=0.3, strokeWidth=1, aria=False)
    smooth = training.transform_window(mean="mean(shown)", frame=[-every, every], sort=[])
    smooth = smooth.mark_line(color="var(--training)", strokeWidth=2, aria=False)
    validation = _losses(rows, "validation_loss", "validation_unit")
    curve = validation.mark_line(
        color="var(--validation)",
        strokeWidth=2,
        point=alt.OverlayMarkDef(size=44, fill="var(--paper)", stroke="var(--validation)"),
    )
    compared = [
        *_lines(lines, "training_unit", "var(--muted)", "right", "width"),
        *_lines(validation_lines, "validation_unit", "var(--validation)", "center", "width / 2"),
    ]
    tooltip = [alt.Tooltip("step:Q"), alt.Tooltip("shown:Q", title="loss", format=".4f")]
    chart = alt.layer(
        batches.encode(x=x, y=y),
        smooth.encode(x=x, y=alt.Y("mean:Q", title=None)),
        curve.encode(x=x, y=y, tooltip=tooltip),
        *compared,
    )
    units = [alt.param(name=f"{part}_unit", value=1) for part in ("training", "validation")]
    return _compiled(chart.add_params(*units), 360, top=18)  # a line's name may stand above it


def training(rows: Rows, steps: int, highest: float) -> Spec:
    """Draw the recorded loss over steps, and the data set ``trained``, which the page fills.

    Where nothing was recorded, losses from 0 to ``highest`` have room.
    """
    losses = [row["loss"] for row in rows] or [0.0, highest]
    scale = alt.Scale(domain=[min(losses), max(losses)])
    x, y = _steps(steps), alt.Y("loss:Q", title=None, scale=scale)
    recorded = _over([{"step": row["step"], "loss": row["loss"]} for row in rows])
    recorded = recorded.mark_line(color="var(--training)", opacity=0.5, strokeWidth=3, aria=False)
    trained = alt.Chart(alt.NamedData("trained")).mark_line(
        color="var(--validation)", strokeWidth=1, aria=False
    )
    return _compiled(alt.layer(recorded.encode(x=x, y=y), trained.encode(x=x, y=y)), 260)


def streams(rows: Rows, steps: int, lanes: Sequence[str]) -> Spec:
    """Bars from ``start`` to ``step`` where a stream drew words, a lane for each stream."""
    color = alt.Color(
        "stream:N",
        legend=None,
        scale=alt.Scale(
            domain=["init", "optimizer", "inference"],
            range=["var(--kind-3)", "var(--training)", "var(--validation)"],
        ),
    )
    chart = (
        _over(rows)
        .mark_bar(height=14, strokeWidth=2, aria=False)  # the stroke shows single steps too
        .encode(
            x=_steps(steps, "start:Q"),
            x2="step:Q",
            y=alt.Y(
                "lane:N",
                title=None,
                scale=alt.Scale(domain=list(lanes)),
                axis=alt.Axis(domain=False, ticks=False, labelLimit=150, grid=True),
            ),
            color=color,
            stroke=color,
            tooltip=[
                alt.Tooltip("stream:N"),
                alt.Tooltip("start:Q", title="after step"),
                alt.Tooltip("step:Q", title="up to step"),
                alt.Tooltip("words:Q", title="random numbers drawn", format=","),
            ],
        )
    )
    return _compiled(chart, 34 * len(lanes))


def embedding(rows: Rows) -> Spec:
    """Tokens at their places in the plane: characters as text; other bytes and merges as dots."""
    base = _over(rows).encode(
        x=alt.X("x:Q", title="first direction", axis=alt.Axis(tickCount=6)),
        y=alt.Y("y:Q", title="second direction", axis=alt.Axis(tickCount=6)),
        color=alt.Color(
            "kind:N", legend=None, scale=alt.Scale(domain=list(KINDS), range=_KIND_COLORS)
        ),
        tooltip=[alt.Tooltip("token:N"), alt.Tooltip("id:Q"), alt.Tooltip("kind:N")],
    )
    is_letter = f"indexof({list(KINDS[:4])}, datum.kind) >= 0"
    dots = base.transform_filter(f"!({is_letter})").mark_circle(size=26, opacity=0.55, aria=False)
    letters = base.transform_filter(is_letter).mark_text(
        fontSize=15, fontWeight=600, font="ui-monospace, monospace", aria=False
    )
    return _compiled(dots + letters.encode(text="token:N"), 480)
