"""Token pass-through from client to worker: only to models that want it, and only once the engine has confirmed one."""

from __future__ import annotations

import msgspec

from gateway.prompt.pipeline import PromptPipeline
from tests.peers import FakeWorker, Message, Wire, eventually, request, response
from tests.prompt_rig import CHAT, TINY, config, ids_of, prompt_of
from tests.relay_rig import MODEL, relay

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
RAW = msgspec.json.encode(BODY)


async def test_ids_are_passed_on_once_the_engine_has_confirmed_them() -> None:
    local = PromptPipeline(config())
    ids = ids_of(await prompt_of(local, CHAT, BODY))
    await local.close()

    async def engine(wire: Wire, message: Message) -> None:
        rendering = "/render " in message.start
        wire.send(response(msgspec.json.encode({"token_ids": ids}) if rendering else message.body))

    models = {MODEL: {"tokenizer": str(TINY), "pass_token_ids": True}}
    async with FakeWorker(engine) as worker, relay([worker], models=models) as rig, rig.connect() as client:
        client.send(request(RAW))
        assert (await client.read_message()).body == RAW  # nothing is proven yet
        await eventually(lambda: rig.services.prompts.checks.proven(MODEL))
        client.send(request(RAW))
        got = msgspec.json.decode((await client.read_message()).body)
    assert got == BODY | {"kv_transfer_params": {"prompt_token_ids": ids}}


async def test_a_model_that_does_not_want_ids_gets_bodies_as_they_came() -> None:
    async def engine(wire: Wire, message: Message) -> None:
        wire.send(response(message.body))

    models = {MODEL: {"tokenizer": str(TINY)}}
    async with FakeWorker(engine) as worker, relay([worker], models=models) as rig, rig.connect() as client:
        rig.services.prompts.checks.results[MODEL, "same"] = 1
        client.send(request(RAW))
        assert (await client.read_message()).body == RAW
