"""What the demo with vLLM shows at its end, on stdout."""

from __future__ import annotations

from typing import Any

from perdure.demo.vllm_scenes import TITLES


def show(outcome: dict[str, Any], setup_s: float | None) -> None:
    """The outcome for people."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(_table(outcome))
    for row in outcome["rows"]:
        console.print(Text(f"{row['name']}: {' '.join(row['text'].split())}"), highlight=False)
    flip, fs = outcome["flip"], outcome["fs"]
    lines = f"""
A was killed with SIGKILL, {outcome["killed_processes"]} processes of it; B had never seen the conversation.
flipped: byte {flip["offset"]} of {flip["file"]}: block {flip["position"]} of {flip["blocks"]}
perdure explain {outcome["store"]} {flip["key"]}
    then: {flip["verdict"]}
    now:  {flip["verdict_after"]}; {len(flip["incidents"])} incident(s)
"""
    if fs is not None:
        verdict = "the same answer" if fs["identical"] else "ANOTHER ANSWER"
        lines += f"""vLLM's fs tier, the same prompt and the same flip: {verdict}
    {fs["cached_tokens"]} tokens were read from {fs["blocks"]} files; flipped: byte {fs["offset"]} of {fs["file"]}
    before: {" ".join(fs["text_before"].split())}
    after:  {" ".join(fs["text"].split())}
"""
    phases = {"setup": setup_s, **outcome["scenes_s"]} if setup_s is not None else outcome["scenes_s"]
    lines += "\n" + "\n".join(f"{seconds:7.1f} s  {TITLES.get(name, name)}" for name, seconds in phases.items())
    lines += f"\n{sum(phases.values()):7.1f} s  in all\nlook at what is left: perdure status {outcome['store']}\n"
    console.print(Text(lines), highlight=False, soft_wrap=True)
    for check, passed in outcome["checks"].items():
        console.print(
            Text(f"{'yes' if passed else 'NO '}  {check}", style="" if passed else "bold red"), highlight=False
        )


def _table(outcome: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"SmolLM2-135M in fp32 on two vLLM servers, blocks of {outcome['block_tokens']} tokens",
        caption="first token: from the request to the first token of the\n"
        "streamed answer. cold: the same question on the same server\n"
        "with a salt nobody has used; those of the sub-agents come\n"
        "one after the other.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    headings = ("", "\nserver", "prompt\ntokens", "\ncached", "first\ntoken", "\ncold", "\nfaster", "tokens\nequal")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in outcome["rows"]:
        table.add_row(
            row["name"],
            row["server"],
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            f"{row['first_token_s']:.2f} s",
            f"{row['cold_first_token_s']:.2f} s",
            f"{row['cold_first_token_s'] / row['first_token_s']:.1f} x",
            "yes" if row["tokens_identical"] else "[bold red]NO[/]",
        )
    return table
