"""What of `access`, `admin` and `models` contradicts itself is refused with its line and a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from farfill.config.load import load_config
from farfill.config.models import config_for_model, config_for_worker
from farfill.core.errors import ConfigError

ISSUER = {"issuer": "https://a/", "audience": ["x"], "jwks": "file:jwks.json"}
SMALL = {"name": "small", "path": "m/small"}
DECODE = {"role": "decode", "site": "near", "listen": "10.0.0.1:7510", "transfer_listen": "10.0.0.1:7511"}


def write(folder: Path, **sections: Any) -> Path:
    values: dict[str, Any] = {
        "version": 1,
        "model": {"name": "large", "path": "m/large"},
        "gateway": {"site": "near", "listen": "10.0.0.1:8000"},
        "registry": {"site": "near", "listen": "10.0.0.1:7400"},
        "workers": {"d": {**DECODE, "listen": "10.0.0.1:7500", "transfer_listen": "10.0.0.1:7501"}},
        "tls": {"ca": "file:ca.pem", "cert": "file:{name}.pem", "key": "file:{name}.key"},
        "tickets": {"signing_key": "file:t.key", "public_key": "file:t.pub"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"access": {"allow_from": ["10.0.0.1/8"]}}, "access.allow_from.0: '10.0.0.1/8' is no network"),
        ({"access": {"trusted_proxies": ["10.0.0.0/99"]}}, "access.trusted_proxies.0: '10.0.0.0/99' is no network"),
        ({"access": {"keys": "none"}}, "access.keys: none, and no issuer of tokens"),
        ({"access": {}, "admission": {"tenant_header": "X-T"}}, "admission.tenant_header: with an access section"),
        ({"access": {"jwt": {"a": ISSUER, "b": ISSUER}}}, "access.jwt.b.issuer: is that of a, too"),
        ({"access": {"jwt": {"a": {**ISSUER, "algorithms": ["HS256"]}}}}, "access.jwt.a.algorithms"),
        ({"access": {"jwt": {"a": {**ISSUER, "jwks": "http://a/jwks"}}}}, "access.jwt.a.jwks"),
        ({"access": {"pepper": "secret"}}, "access.pepper"),
        ({"admin": {"listen": "10.0.0.1:8000"}}, "same address as"),
        ({"admin": {"listen": "10.0.0.1:8001", "tls_cert": "file:x"}}, "admin.tls_cert: tls_cert without tls_key"),
        ({"admin": {"listen": "10.0.0.1:8001", "certificates": []}}, "nobody could change anything"),
        ({"admin": {"listen": "10.0.0.1:8001", "monitors": ["admin"]}}, "'admin' is not site/role/name"),
        ({"models": {"s": SMALL}}, "models.s: no worker decodes this model; add a decode worker with model: s"),
        ({"models": {"s": {**SMALL, "aliases": ["large"]}}}, "models.s.aliases: 'large' is the name of model, too"),
        ({"workers": {"e": {**DECODE, "model": "absent"}}}, "workers.e.model: there is no model 'absent' under models"),
    ],
)
def test_contradiction_is_told_with_its_place(tmp_path: Path, sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, **sections))
    assert told in str(caught.value)
    assert "cluster.yaml:" in str(caught.value)


def test_each_model_sees_the_file_as_if_it_were_alone(tmp_path: Path) -> None:
    loaded = load_config(
        write(
            tmp_path,
            models={"s": {**SMALL, "remote_prefill_threshold_tokens": 99}},
            workers={"e": {**DECODE, "model": "s"}},
        )
    )
    config = loaded.config
    own = config_for_worker(config, "e")
    assert (own.model.name, own.models, own.routing.remote_prefill_threshold_tokens) == ("small", {}, 99)
    assert config_for_worker(config, "d").model.name == "large"
    assert config_for_model(config, "").routing.remote_prefill_threshold_tokens == 4096
    assert loaded.for_worker("e").model_dir == loaded.base_dir / "m/small"
