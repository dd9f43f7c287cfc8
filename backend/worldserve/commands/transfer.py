"""`ctrlcache debug-transfer`: how one couplet's answer migrates to other controls, and how well."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["debug_transfer"]

_DISTANCES = (0.01, 0.03, 0.05, 0.1, 0.2, 0.4)


def debug_transfer(
    clip: Annotated[Path, typer.Option(help="An .npz with frames, controls and physics.")] = Path(
        "client_examples/clips/drawer-open.npz"
    ),
    frame: Annotated[int, typer.Option(min=0, help="The present frame.")] = 16,
    control: Annotated[
        str, typer.Option(help="Control of the couplet, comma-separated; default: the clip's own.")
    ] = "",
    weights: Annotated[Path, typer.Option(help="Directory of the weights.")] = Path(
        "model_repository/world_model/1"
    ),
    horizon: Annotated[int, typer.Option(min=1, help="Predicted frames.")] = 8,
    budget: Annotated[float, typer.Option(min=0.0, help="Relative state error allowed.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Of the directions that are tried.")] = 0,
) -> None:
    """Score one couplet and compare its migrated answers with what the model computes."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from ctrlcache.calibration import TrustModel, trust_path
    from ctrlcache.errors import CalibrationError
    from ctrlcache.scores import relative_error
    from ctrlcache.transfer import Jacobian
    from worldserve.calibrate import REFERENCE, load_model
    from worldserve.neighbourhood import Present, Sampling, neighbourhood

    model = load_model(REFERENCE, weights)
    spec = model.spec
    console = Console()
    with np.load(clip) as arrays:
        frames, controls = arrays["frames"], arrays["controls"]
    if not frame < len(frames):
        raise typer.BadParameter(f"frame {frame}: the clip has {len(frames)} frames")
    conditioning, _ = model.condition("", "")
    tokens = model.embed(frames[: frame + 1])
    memory = model.assemble([], 0)
    if frame:
        memory = model.absorb(memory, tokens[:frame], controls[:frame], conditioning).memory
    centre = controls[min(frame, len(controls) - 1)]
    if control:
        centre = np.array([float(x) for x in control.split(",")], np.float32)
        if centre.shape != (spec.control_dim,):
            raise typer.BadParameter(f"control: {spec.control_dim} numbers are expected")
    try:
        trust = TrustModel.load(trust_path(weights), spec.weights_digest)
    except CalibrationError as error:
        trust = None
        console.print(f"[yellow]no bounds can be stated: {error}")
    radius = trust.probe_radius if trust else 0.05
    present = Present(frame, memory, tokens[frame], frames[frame], centre, conditioning, "")
    sampling = Sampling(horizon=horizon, probe_radii=(radius,), distances=_DISTANCES)
    around = neighbourhood(model, present, np.random.default_rng(seed), sampling, centre)
    scores = around.scores(radius, spec.state_scale)
    console.print(
        f"couplet at {np.round(centre, 3).tolist()}: sensitivity {scores.sensitivity:.4f}, "
        f"curvature {scores.curvature:.3f}, transferability {scores.transferability:.1f}"
    )
    if trust:
        console.print(
            f"trusted within {trust.radius(scores.curvature, budget):.3f} at a budget of {budget}"
        )
    move = Jacobian()
    moved = move.migrate(around.own.states, scores.jacobian, around.control, around.query_controls)
    errors = relative_error(moved, around.truths, spec.state_scale)
    plain = relative_error(
        np.broadcast_to(around.own.states, around.truths.shape), around.truths, spec.state_scale
    )
    physics, true_physics = model.physics(moved), model.physics(around.truths)
    table = Table("distance", "reused as it is", "migrated", "bound", *spec.physics_names[:3])
    for i, distance in enumerate(around.distances):
        bound = trust.bound(scores.curvature, float(distance)) if trust else float("nan")
        off = np.abs(physics[i, -1, :3] - true_physics[i, -1, :3])
        table.add_row(
            f"{distance:.3f}",
            f"{plain[i]:.5f}",
            f"{errors[i]:.5f}",
            f"{bound:.5f}",
            *(f"{value:.5f}" for value in off),
        )
    console.print(table)
    console.print("Errors are relative, of the whole trajectory; the last columns, at its end.")
    bounds = [trust.bound(scores.curvature, float(d)) for d in around.distances] if trust else []
    if bounds and bool((errors > bounds).any()):
        console.print("[yellow]an error is above its bound: at most 5 % of accepted uses may be")
