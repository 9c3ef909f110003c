"""Log lines carry who spoke, in one format whoever wrote them, and never a secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from farfill.telemetry.logs import setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_line_has_bound_and_context_fields(stream: io.StringIO):
    setup_logging("info", "json", stream=stream, role="decode", site="near", name="d1")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("hello", tokens=3)
    (line,) = lines(stream)
    expected = {
        "event": "hello", "level": "info", "role": "decode", "site": "near", "name": "d1",
        "request_id": "r1", "tokens": 3,
    }  # fmt: skip
    assert line.items() >= expected.items()
    assert line["timestamp"].endswith("Z")


def test_stdlib_logging_takes_the_same_way(stream: io.StringIO):
    setup_logging("info", "json", stream=stream, role="gateway")
    logging.getLogger("aiohttp.server").warning("odd %s", "request", extra={"api_key": "k"})
    logging.getLogger("aiohttp.server").debug("not shown")
    (line,) = lines(stream)
    assert (
        line.items() >= {"event": "odd request", "role": "gateway", "level": "warning", "api_key": "[redacted]"}.items()
    )


def test_level_filters_structlog(stream: io.StringIO):
    setup_logging("warning", "json", stream=stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().error("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


@pytest.mark.parametrize("fmt", ["json", "text"])
def test_secrets_never_reach_a_line(stream: io.StringIO, fmt):
    setup_logging("info", fmt, stream=stream)
    pem = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----"
    try:
        raise ValueError(f"bad key {pem}")
    except ValueError:
        structlog.get_logger().exception(
            "Authorization: Bearer hunter2",
            ticket="hunter2",
            headers={"Authorization": "hunter2", "X-Api-Key": "hunter2", "accept": "all"},
            items=[pem, {"signing_key": "hunter2"}],
            queued_tokens=5,
        )
    assert "hunter2" not in stream.getvalue()
    assert "[redacted]" in stream.getvalue()
    assert "queued_tokens" in stream.getvalue()
    assert "ValueError: bad key" in stream.getvalue()


@pytest.mark.parametrize("secret", ["ff_0123456789AB_" + "s" * 49, "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"])
def test_keys_and_tokens_are_cut_out_of_any_text(stream: io.StringIO, secret: str):
    setup_logging("info", "json", stream=stream)
    structlog.get_logger().info(f"model {secret!r} does not exist", error=f"x{secret}y z-{secret}.", key="0123456789AB")
    (line,) = lines(stream)
    assert secret[16:-1] not in stream.getvalue()
    assert line["key"] == "0123456789AB"


@pytest.mark.parametrize("fmt", ["json", "text"])
def test_whoever_logs_goes_on_when_nobody_reads(fmt: Literal["json", "text"]):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    setup_logging("info", fmt, stream=Gone())
    structlog.get_logger().info("into the void")
    closed = io.StringIO()
    setup_logging("info", fmt, stream=closed)
    closed.close()
    structlog.get_logger().info("into the void")
