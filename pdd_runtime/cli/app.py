"""The commands, their options and their help."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime import __version__
from pdd_runtime.cli import (
    ab_app,
    bench_app,
    certs_app,
    chaos_app,
    complete,
    keys_app,
    plan_app,
    plugins_app,
    profile_app,
    render_app,
    simulate_app,
    workload_app,
)
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import (
    Drawing,
    Format,
    GraphFile,
    Name,
    Output,
    Overrides,
    Patience,
    Running,
    Surge,
    WaitTimeout,
    examples,
)

app = typer.Typer(
    name="pdd-runtime",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Serve language models from a graph of prefill, relay and main-decode pools, over several datacenters.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or graph, 3 not running, 4 running already.",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"pdd-runtime {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(
    epilog=examples(
        "pdd-runtime up graphs/quickstart.yaml",
        "pdd-runtime up graphs/quickstart.yaml -d --wait --set spec.frontend.port=9000",
        'pdd-runtime up graphs/quickstart.yaml --ask "Why is the sky blue?"',
        "pdd-runtime up graphs/quickstart.yaml --dry-run",
        "pdd-runtime up graphs/h100-h200.yaml --cluster dc-b --secret-file /etc/pdd/secret",
    )
)
def up(
    graph: GraphFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Start only what stands in this cluster; the others have launchers of their own.",
            autocompletion=complete.clusters,
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            help="With --cluster: the secret that all clusters share. Default: the environment's PDD_SECRET.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Start it in the background and return.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Like -d, but return when requests are answered.")] = False,
    wait_timeout: WaitTimeout = None,
    ask: Annotated[
        str | None,
        typer.Option(
            "--ask",
            metavar="TEXT|@FILE",
            help="When ready, ask this, or what the file says; stream the answer and draw its timeline.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest answer to --ask.")] = 128,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show the processes' logs.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Check all, say what would run, and start nothing.")] = False,
    patience: Patience = 60.0,
    surge: Surge = None,
    output: Annotated[
        Format, typer.Option("--format", help="How to print what runs; json with -d, --wait or --dry-run.")
    ] = Format.table,
) -> None:
    """Bring a graph up and keep it up. Ctrl-C drains it, a second Ctrl-C kills it. Where it runs already, -d applies
    what has changed in the file, and leaves alone what has not."""
    from pdd_runtime.cli import change
    from pdd_runtime.cli.ask import question
    from pdd_runtime.cli.cluster import part_of
    from pdd_runtime.cli.dry_run import dry_change, dry_run
    from pdd_runtime.cli.port import check_free
    from pdd_runtime.cli.up import UpOptions, log_to, up_again, up_attached, up_detached
    from pdd_runtime.cli.validate import load_checked
    from pdd_runtime.launch import GraphState, Manner

    as_json = output is Format.json
    if as_json and not (detach or wait or dry):
        raise typer.BadParameter("json needs -d, --wait or --dry-run: in the foreground it would never end")
    if as_json and ask is not None:
        raise typer.BadParameter("json and --ask do not go together")
    consoles = Consoles()
    loaded, plugins = load_checked(graph, overrides or [], consoles)
    part = part_of(loaded, plugins, cluster, secret_file)
    if ask is not None and not part.has_frontend(loaded.graph):
        there = " or ".join(loaded.graph.frontend_clusters)
        raise typer.BadParameter(f"--ask needs the frontend, which is in cluster {there}")
    again = (detach or wait or dry) and change.runs(loaded, part)
    if not again:
        check_free(loaded, part)
    if dry:
        (dry_change if again else dry_run)(loaded, part, as_json, consoles)
        return
    wait = wait or (detach and ask is not None)
    options = UpOptions(wait, wait_timeout, None if ask is None else question(ask), max_tokens, quiet, as_json)
    if again:
        manner = Manner(patience=patience, surge=surge)
        code = asyncio.run(up_again(loaded, part, change.planned(loaded, part), manner, options, consoles))
    elif detach or wait:
        code = asyncio.run(up_detached(loaded, part, options, consoles))
    else:
        log_to(GraphState(part.name(loaded.graph)))
        code = asyncio.run(up_attached(loaded, part, plugins, options, consoles))
    raise typer.Exit(code)


@app.command(epilog=examples("pdd-runtime ps", "pdd-runtime ps quickstart --format json"))
def ps(name: Name = None, output: Output = Format.table) -> None:
    """List the processes of a running graph."""
    from pdd_runtime.cli.ps import ps as run

    run(name, output is Format.json, Consoles())


@app.command(
    epilog=examples(
        "pdd-runtime logs",
        "pdd-runtime logs main -f",
        "pdd-runtime logs main/1 -n 20",
        "pdd-runtime logs --request req-5f2b6c7d8e9f0a1b",
    )
)
def logs(
    pool: Annotated[
        str | None,
        typer.Argument(
            metavar="POOL",
            help="A pool, POOL/INDEX, `frontend` or `launcher`. Default: all.",
            autocompletion=complete.processes,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines of each log to begin with.")] = 50,
    request: Annotated[
        str | None,
        typer.Option("--request", "-r", metavar="ID", help="Only what any process has logged about this request."),
    ] = None,
    graph: Running = None,
    output: Annotated[Format, typer.Option("--format", help="How to print it; json: an object a line.")] = Format.table,
) -> None:
    """Show what the processes of a graph have written."""
    from pdd_runtime.cli.logs import LogOptions
    from pdd_runtime.cli.logs import logs as run

    run(graph, LogOptions(pool, lines, follow, request, output is Format.json), Consoles())


@app.command(
    epilog=examples(
        "pdd-runtime restart",
        "pdd-runtime restart main/1 --patience 300",
        "pdd-runtime restart frontend --graph quickstart",
        "pdd-runtime restart main --no-surge",
    )
)
def restart(
    process: Annotated[
        str | None,
        typer.Argument(
            metavar="POOL[/INDEX]",
            help="A pool, one of its processes, or `frontend`. Default: all.",
            autocompletion=complete.processes,
        ),
    ] = None,
    graph: Running = None,
    patience: Patience = 60.0,
    surge: Surge = None,
    start: Annotated[
        float, typer.Option("--start", min=0.0, metavar="SECONDS", help="How long a process may take to be ready.")
    ] = 600.0,
    output: Output = Format.table,
) -> None:
    """Replace processes of a running graph, while it serves. One is drained at a time; the next one's turn comes when
    its replacement is ready. It stops at a replacement that does not become ready."""
    from pdd_runtime.cli.change import restart as run
    from pdd_runtime.launch import Manner

    manner = Manner(patience=patience, surge=surge, start=start)
    raise typer.Exit(run(graph, process, manner, output is Format.json, Consoles()))


@app.command(epilog=examples("pdd-runtime down", "pdd-runtime down quickstart", "pdd-runtime down --timeout 0"))
def down(
    name: Name = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="How long running requests may go on.")
    ] = 30.0,
    output: Output = Format.table,
) -> None:
    """Stop a graph. Afterwards none of its processes is left, even where its launcher was killed before."""
    from pdd_runtime.cli.down import down as run

    run(name, timeout, output is Format.json, Consoles())


@app.command(epilog=examples("pdd-runtime validate graphs/quickstart.yaml --set spec.handoff.plugin=one-shot"))
def validate(graph: GraphFile, overrides: Overrides = None, output: Output = Format.table) -> None:
    """Check a graph and its plugins, and draw it."""
    from pdd_runtime.cli.validate import validate as run

    raise typer.Exit(run(graph, overrides or [], output is Format.json, Consoles()))


@app.command(
    epilog=examples(
        "pdd-runtime graph graphs/quickstart.yaml",
        "pdd-runtime graph graphs/quickstart.yaml --format svg > quickstart.svg",
        "pdd-runtime graph graphs/quickstart.yaml --format json | jq .spec.pools",
    )
)
def graph(
    graph: GraphFile,
    overrides: Overrides = None,
    output: Annotated[Drawing, typer.Option("--format", help="How to draw it.")] = Drawing.text,
) -> None:
    """Draw a graph, or print it as JSON. It need not run, and its plugins need not be installed."""
    from pdd_runtime.cli.graph import draw

    draw(graph, overrides or [], output, Consoles())


@app.command(
    epilog=examples(
        "pdd-runtime doctor",
        "pdd-runtime doctor graphs/quickstart.yaml",
        "pdd-runtime doctor quickstart --format json | jq .ok",
    )
)
def doctor(
    graph: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|GRAPH",
            help="A running graph's name, or a graph's file. Default: only this host.",
            autocompletion=complete.names_and_files,
        ),
    ] = None,
    overrides: Overrides = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Send a running graph a request, to see bytes move.")
    ] = True,
    output: Output = Format.table,
) -> None:
    """Check this host, a graph, or a running graph. Of one that runs it checks that bytes move over each edge."""
    from pdd_runtime.cli.doctor import doctor as run

    raise typer.Exit(run(graph, overrides or [], probe, output is Format.json, Consoles()))


@app.command(epilog=examples("pdd-runtime schema > pdd.schema.json"))
def schema() -> None:
    """Print the JSON Schema of graphs, for editors. The installed plugins and their settings are in it. Begin a graph
    with the line `# yaml-language-server: $schema=pdd.schema.json`, and your editor completes it."""
    from pdd_runtime.cli.schema import schema as run

    run(Consoles())


@app.command(
    epilog=examples(
        'pdd-runtime ask "Why is the sky blue?"',
        "pdd-runtime ask @graphs/quickstart-question.txt",
        'pdd-runtime ask "Why?" --format json | jq .timeline.route',
    )
)
def ask(
    text: Annotated[str, typer.Argument(metavar="TEXT|@FILE", help="What to ask, or the file that says it.")],
    graph: Running = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest answer.")] = 128,
    output: Output = Format.table,
) -> None:
    """Ask a running graph something. The answer streams, then its timeline is drawn."""
    from pdd_runtime.cli.ask import ask_running

    ask_running(text, graph, max_tokens, output is Format.json, Consoles())


@app.command(epilog=examples("pdd-runtime timeline req-5f2b6c7d8e9f0a1b"))
def timeline(
    request: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id: the response header x-pdd-request-id.")
    ],
    graph: Running = None,
    output: Output = Format.table,
) -> None:
    """Draw where a request's time went. Prefill, KV transfers, relay, handoff and main have a bar each."""
    from pdd_runtime.cli.show_timeline import show_timeline

    show_timeline(request, graph, output is Format.json, Consoles())


@app.command(epilog=examples("pdd-runtime cancel req-5f2b6c7d8e9f0a1b"))
def cancel(
    request: Annotated[
        str, typer.Argument(metavar="ID", help="The request's id: the response header x-pdd-request-id.")
    ],
    graph: Running = None,
    output: Output = Format.table,
) -> None:
    """End a running request, with all its choices, on all workers. Its client is told."""
    from pdd_runtime.cli.cancel import cancel as run

    run(request, graph, output is Format.json, Consoles())


app.command(epilog=bench_app.EXAMPLES)(bench_app.bench)
app.command(epilog=chaos_app.EXAMPLES)(chaos_app.chaos)
app.add_typer(ab_app.app, name="ab")
app.add_typer(certs_app.app, name="certs")
app.add_typer(keys_app.app, name="keys")
app.add_typer(plugins_app.app, name="plugins")
app.add_typer(render_app.app, name="render")
app.command(epilog=workload_app.EXAMPLES)(workload_app.workload)
app.command(epilog=profile_app.EXAMPLES)(profile_app.profile)
app.command(epilog=plan_app.EXAMPLES)(plan_app.plan)
app.command(epilog=simulate_app.EXAMPLES)(simulate_app.simulate)
