"""Whether the frontend will be able to listen, asked before anything is started."""

from __future__ import annotations

from pdd_runtime.errors import LaunchError
from pdd_runtime.frontend.server import listen
from pdd_runtime.graph import Frontend, LoadedGraph
from pdd_runtime.graph.document import Route
from pdd_runtime.graph.models import Admin
from pdd_runtime.launch import GraphState, Part


def check_free(loaded: LoadedGraph, part: Part) -> None:
    """Raises `AlreadyRunningError` where the graph runs, and `LaunchError` where its port is taken."""
    state = GraphState(part.name(loaded.graph))
    state.check_free()
    dead = state.launcher()
    if not part.has_frontend(loaded.graph) or (dead and dead.left):
        # Its frontend may still have the port. The new launcher ends what is left before it starts anything.
        return
    fault = port_fault(loaded)
    if fault:
        raise fault


def port_fault(loaded: LoadedGraph) -> LaunchError | None:
    """What keeps the frontend from its ports, with the place in the graph; None: nothing, now."""
    frontend = loaded.graph.spec.frontend
    ports: list[tuple[Route, Frontend | Admin]] = [(("spec", "frontend"), frontend)]
    if frontend.admin is not None:
        ports.append((("spec", "frontend", "admin"), frontend.admin))
    for route, port in ports:
        try:
            listen(port.host, port.port, setting=".".join(map(str, route))).close()
        except LaunchError as error:
            return LaunchError(
                error.what,
                where=loaded.locate((*route, "port")),
                why=_holder(port.port) or error.why,
                fix=error.fix,
            )
    return None


def _holder(port: int) -> str:
    """The graph of this user whose frontend has the port."""
    for state in GraphState.all():
        launcher = state.running()
        if launcher and launcher.url.rpartition(":")[2] == str(port):
            return f"graph {state.name} listens there: {launcher.url}"
    return ""
