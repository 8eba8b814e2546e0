"""An agent without a language model that mends training scripts through `stepguard mcp` alone.

`python scripted_agent.py SERVER...` starts the command SERVER, speaks to it over stdin and stdout
with the client of the official SDK, and prints what it did as JSON. It knows no bug and opens no
file: every decision is taken from an answer of a tool.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client


async def ask(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments)
    if answer.is_error:
        return {"error": answer.content[0].text}
    return dict(answer.structured_content)


async def mend(client: Client, run: dict[str, Any]) -> dict[str, Any]:
    """Understand the incident of one run, fix it if a fix is proven, and prove that it is gone."""
    listed = (await ask(client, "incidents", run=run["path"]))["incidents"]
    incident = next((one for one in listed if one["proven_fix"]), listed[0])
    measured = (await ask(client, "evidence", path=incident["path"]))["incident"]
    finding, source = measured["findings"][0], measured["origin"]["source"]
    page = await ask(client, "explain", code=finding["code"])
    report = {"run": run["run"], "code": page["code"], "source": source, "applied": []}
    proposed = await ask(client, "fix", path=incident["path"])
    loss = proposed.get("after", {}).get("loss")
    # only a change of the file where the bad value originated, with a finite loss after it
    file = source.rsplit(":", 1)[0]
    if loss is None or f"+++ b/{file}\n" not in proposed["diff"]:
        return report | {"refused": proposed.get("error", "the diff changes another file")}
    applied = await ask(client, "fix", path=incident["path"], apply=True)
    if "error" in applied:
        return report | {"refused": applied["error"], "diff": proposed["diff"]}
    again = await ask(client, "replay", path=incident["path"])
    return report | {"applied": applied["applied"], "reproduced": again["reproduced"]}


async def work(command: list[str]) -> list[dict[str, Any]]:
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with Client(stdio_client(parameters)) as client:
        runs = (await ask(client, "runs"))["runs"]
        return [await mend(client, run) for run in runs if run["incidents"]]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(work(sys.argv[1:]))))
