"""Who gets in: keys and tokens that are right, and every way in which they are not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, RSAKey
from multidict import CIMultiDict

from farfill.clock import VirtualClock
from farfill.core.errors import InvalidRequestError
from farfill.gateway.access import Access, Credential, credential_of
from farfill.gateway.access_tokens import MAX_STALE_S, MIN_FETCH_PERIOD_S
from farfill.gateway.errors import ForbiddenError, KeysUnavailableError, UnauthorisedError
from farfill.gateway.principal import Principal, RateLimits
from farfill.registry.api_keys import new_key
from support.access import BookOfKeys, Seen, make_access

ISSUER, AUDIENCE = "https://login.example.com/", "farfill"
RSA, OTHER_RSA, EC = (
    RSAKey.generate_key(2048, {"kid": "r1"}, auto_kid=False),
    RSAKey.generate_key(2048, {"kid": "r2"}),
    ECKey.generate_key("P-256", {"kid": "e1"}),
)


class Issuer:
    """An issuer whose published keys a test changes."""

    def __init__(self, *keys: Any) -> None:
        self.keys = list(keys)
        self.reads = 0
        self.broken = False

    async def read(self) -> bytes:
        self.reads += 1
        if self.broken:
            raise OSError("no route")
        return json.dumps(KeySet(self.keys).as_dict(private=False)).encode()


class Door:
    """An access with one issuer, and what it told."""

    def __init__(self, *keys: Any, **changes: Any) -> None:
        self.clock, self.seen, self.book = VirtualClock(), Seen(), BookOfKeys()
        self.issuer = Issuer(*(keys or (RSA,)))
        jwt_config = {"issuer": ISSUER, "audience": [AUDIENCE], "jwks": "file:x", **changes}
        self.access: Access = make_access(
            self.book, self.seen, clock=self.clock, readers={"login": self.issuer.read}, jwt={"login": jwt_config}
        )

    def token(self, key: Any = RSA, alg: str = "RS256", **claims: Any) -> str:
        now = int(self.clock.unix_s())
        body = {"iss": ISSUER, "aud": AUDIENCE, "sub": "team-a", "exp": now + 600, **claims}
        header = {"alg": alg, "kid": key.kid} if key.kid else {"alg": alg}
        return jwt.encode(header, {k: v for k, v in body.items() if v is not None}, key, algorithms=[alg])

    async def enter(self, text: str, **fields: Any) -> Principal:
        return await self.access.identify(Credential(f"Bearer {text}", **fields))

    async def refused(self, text: str) -> str:
        with pytest.raises(UnauthorisedError) as caught:
            await self.enter(text)
        return caught.value.cause


async def test_key_tells_whose_request_it_is() -> None:
    door = Door()
    key = door.book.add(tenant="a", models=["m*"], requests_per_s=5.0, priority=10, salt="s", allow_from=["10.0.0.0/8"])
    found = await door.enter(key, peer="10.1.1.1")
    assert (found.tenant, found.salt, found.best_priority) == ("a", "s", 10)
    assert found.limits == RateLimits(5.0, 0.0, 10.0)
    assert found.may_use(["m1"])
    assert not found.may_use(["n1"])
    assert key[16:] not in repr(found)
    assert door.seen.outcomes == [("key", "ok")]


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda book: new_key()[1], "unknown_key"),
        (lambda book: new_key(book.add()[3:15])[1], "wrong_key"),
        (lambda book: book.add(expires_unix_s=1.0), "expired"),
        (lambda book: book.add(scope="admin"), "scope"),
        (lambda book: book.add(scope="monitor"), "scope"),
        (lambda book: book.add()[:-1], "malformed"),
        (lambda book: "sk-of-somebody-else", "malformed"),
        (lambda book: "ff_" + "é" * 62, "malformed"),
    ],
)
async def test_wrong_key_is_refused_and_the_client_hears_little(make: Callable[[BookOfKeys], str], cause: str) -> None:
    door = Door()
    with pytest.raises(UnauthorisedError) as caught:
        await door.enter(make(door.book))
    assert caught.value.cause == cause
    assert caught.value.reason == "invalid_api_key"
    assert str(caught.value) in ("incorrect API key provided", "this API key has expired")
    assert door.seen.outcomes == [("key", cause)]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic dXNlcjpw", "ff_something"])
async def test_missing_credential_is_told_how_to_bring_one(header: str | None) -> None:
    door = Door()
    with pytest.raises(UnauthorisedError, match="Authorization: Bearer") as caught:
        await door.access.identify(Credential(header))
    assert (caught.value.cause, caught.value.reason) == ("missing", "missing_api_key")


@pytest.mark.parametrize("second", ["Bearer other", "Basic dXNlcjpw", "", "Bearer first"])
def test_second_credential_is_refused_whichever_comes_first(second: str) -> None:
    for values in (("Bearer first", second), (second, "Bearer first")):
        headers = CIMultiDict([("Authorization", values[0]), ("authorization", values[1])])
        with pytest.raises(InvalidRequestError, match="send one") as caught:
            credential_of(headers, None)
        assert caught.value.param == "Authorization"
    assert credential_of(CIMultiDict([("authorization", "Bearer first")]), "p").authorization == "Bearer first"
    assert credential_of(CIMultiDict(), None).authorization is None


async def test_keys_not_heard_of_yet_let_nobody_in() -> None:
    door = Door()
    key = door.book.add()
    door.book.known = False
    with pytest.raises(KeysUnavailableError):
        await door.enter(key)
    assert door.seen.outcomes == [("key", "keys_unavailable")]


async def test_changed_key_counts_from_its_next_request() -> None:
    door = Door()
    key = door.book.add(tenant="a")
    assert (await door.enter(key)).tenant == "a"
    held = door.book.found[key[3:15]]
    door.book.found[held.id] = type(held)(id=held.id, digest=held.digest, tenant="b")
    assert (await door.enter(key)).tenant == "b"
    del door.book.found[held.id]
    assert await door.refused(key) == "unknown_key"


async def test_address_counts_twice_everywhere_and_for_the_key() -> None:
    book, seen = BookOfKeys(), Seen()
    access = make_access(book, seen, allow_from=["10.0.0.0/8"], trusted_proxies=["10.0.0.1/32"])
    key = book.add(allow_from=["10.2.0.0/16"])

    async def enter(peer: str, *forwarded: str) -> Principal:
        return await access.identify(Credential(f"Bearer {key}", peer, forwarded))

    await enter("10.2.0.5")
    await enter("10.0.0.1", "10.2.0.5")
    for peer, forwarded, cause in (
        ("192.0.2.1", (), "source"),
        ("192.0.2.1", ("10.2.0.5",), "source"),
        ("10.0.0.1", ("192.0.2.1",), "source"),
        ("10.3.0.5", (), "key_source"),
        ("10.3.0.5", ("10.2.0.5",), "key_source"),
    ):
        with pytest.raises(ForbiddenError) as caught:
            await enter(peer, *forwarded)
        assert (caught.value.cause, caught.value.reason) == (cause, "source_not_allowed")


async def test_admin_keys_are_for_the_admin_api_alone() -> None:
    door = Door()
    admin, monitor, api = door.book.add(scope="admin"), door.book.add(scope="monitor"), door.book.add()
    assert door.access.identify_admin(Credential(f"Bearer {admin}")).scope == "admin"
    assert door.access.identify_admin(Credential(f"Bearer {monitor}")).scope == "monitor"
    for text in (api, door.token()):
        with pytest.raises(UnauthorisedError):
            door.access.identify_admin(Credential(f"Bearer {text}"))


async def test_token_tells_whose_request_it_is() -> None:
    door = Door(models_claim="farfill.models", tenant_claim="realm.team", priority_claim="prio")
    found = await door.enter(door.token(realm={"team": "a"}, farfill={"models": ["m1", "m2*"]}, prio=20))
    assert (found.tenant, found.models, found.best_priority) == ("a", ("m1", "m2*"), 20)
    spaced = await door.enter(door.token(realm={"team": "a"}, farfill={"models": "m1 m3"}))
    assert (spaced.models, spaced.best_priority) == (("m1", "m3"), -100)
    assert door.seen.outcomes == [("token", "ok")] * 2


NO_PRIORITY = ["3", "", 1.5, float("nan"), float("inf"), True, False, [], {}, 101, -101, 1000, 10**30, -(10**400)]


@pytest.mark.parametrize("told", NO_PRIORITY, ids=lambda told: repr(told)[:12])
async def test_priority_that_is_no_whole_number_in_range_lets_nobody_in(told: Any) -> None:
    door = Door(priority_claim="prio")
    assert await door.refused(door.token(prio=told)) == "jwt_claims"


@pytest.mark.parametrize(("told", "best"), [(-100, -100), (100, 100), (0, 0), (3.0, 3)])
async def test_priority_within_its_range_counts_as_a_whole_number(told: Any, best: int) -> None:
    door = Door(priority_claim="prio")
    found = (await door.enter(door.token(prio=told))).best_priority
    assert (found, type(found)) == (best, int)


@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize(
    "told", [10**400, -(10**400), 10**30, float("nan"), float("inf"), -float("inf"), True, "9" * 30, [], {}]
)
async def test_time_that_no_calendar_has_is_refused(claim: str, told: Any) -> None:
    door = Door()
    assert await door.refused(door.token(**{claim: told})) == "jwt_claims"


@pytest.mark.parametrize("head", [b"[" * 3000, b'{"a":' * 1000, b"9" * 5000, b'{"alg":"RS256","kid":["r1"]}', b"\xff"])
async def test_header_that_cannot_be_read_is_refused(head: bytes) -> None:
    door = Door()
    _, body, signature = door.token().split(".")
    text = f"{base64.urlsafe_b64encode(head).rstrip(b'=').decode()}.{body}.{signature}"
    assert (await door.refused(text)).startswith("jwt_")


async def test_tenant_that_is_no_name_becomes_a_digest_nobody_can_imitate() -> None:
    door = Door()
    odd = (await door.enter(door.token(sub="auth0|507f1f77"))).tenant
    assert odd.startswith("t-")
    assert (await door.enter(door.token(sub=odd))).tenant != odd
    assert (await door.enter(door.token(sub="a b"))).tenant != (await door.enter(door.token(sub="a|b"))).tenant


def forged(door: Door) -> str:
    """A token signed with the public key as if it were a secret: the classic confusion of RS256 with HS256."""
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "r1"}).encode()).rstrip(b"=").decode()
    signed = f"{head}.{door.token().split('.')[1]}"
    mac = hmac.new(RSA.as_pem(private=False), signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def unsigned(door: Door) -> str:
    body = door.token().split(".")[1]
    return "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0." + body + "."


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda d: d.token(iss="https://evil.example/"), "jwt_issuer"),
        (lambda d: d.token(iss=None), "jwt_issuer"),
        (lambda d: d.token(aud="somebody-else"), "jwt_claims"),
        (lambda d: d.token(aud=None), "jwt_claims"),
        (lambda d: d.token(exp=None), "jwt_claims"),
        (lambda d: d.token(exp=int(d.clock.unix_s()) - 31), "jwt_expired"),
        (lambda d: d.token(exp="never"), "jwt_claims"),
        (lambda d: d.token(nbf=int(d.clock.unix_s()) + 31), "jwt_claims"),
        (lambda d: d.token(iat=int(d.clock.unix_s()) + 31), "jwt_claims"),
        (lambda d: d.token(sub=""), "jwt_tenant"),
        (lambda d: d.token(sub=None), "jwt_tenant"),
        (lambda d: d.token(OTHER_RSA), "jwt_unknown_key"),
        (lambda d: d.token(alg="PS256"), "jwt_signature"),
        (lambda d: d.token()[:-8] + "AAAAAAAA", "jwt_signature"),
        (forged, "jwt_signature"),
        (unsigned, "jwt_malformed"),
        (lambda d: "a.b.c", "jwt_issuer"),
        (lambda d: "a..c", "jwt_malformed"),
        (lambda d: "a." + "b" * 9000 + ".c", "jwt_malformed"),
    ],
)
async def test_wrong_token_is_refused(make: Callable[[Door], str], cause: str) -> None:
    door = Door()
    with pytest.raises(UnauthorisedError) as caught:
        await door.enter(make(door))
    assert caught.value.cause == cause
    assert str(caught.value) in ("incorrect API key provided", "this token has expired")


async def test_clock_differences_within_the_leeway_are_tolerated() -> None:
    door = Door()
    now = int(door.clock.unix_s())
    await door.enter(door.token(exp=now - 29))
    await door.enter(door.token(nbf=now + 29))


async def test_known_token_is_not_verified_again_but_expires() -> None:
    door = Door()
    token = door.token()
    first = await door.enter(token)
    assert await door.enter(token) is first
    door.clock.advance(601 + 30)
    assert await door.refused(token) == "jwt_expired"


async def test_new_key_of_the_issuer_is_fetched_once_when_a_token_names_it() -> None:
    door = Door()
    await door.enter(door.token())
    door.issuer.keys = [RSA, EC]
    es = door.token(EC, alg="ES256")
    assert await door.refused(es) == "jwt_unknown_key", "asked a moment ago; not again for every stranger"
    assert door.issuer.reads == 1
    door.clock.advance(MIN_FETCH_PERIOD_S)
    assert (await door.enter(es)).tenant == "team-a"
    assert door.issuer.reads == 2


async def test_key_that_the_issuer_withdrew_counts_no_more_after_the_next_reading() -> None:
    door = Door(RSA, OTHER_RSA, jwks_refresh_s=60)
    token = door.token()
    await door.enter(token)
    door.issuer.keys = [OTHER_RSA]
    door.clock.advance(61)
    await door.enter(token)  # the old keys do while new ones are read
    await door.access._tokens._issuers[ISSUER].keys._reading  # type: ignore[union-attr]
    assert await door.refused(token) == "jwt_unknown_key"


async def test_issuer_that_is_away_is_lived_with_for_a_day() -> None:
    door = Door()
    door.issuer.broken = True
    with pytest.raises(KeysUnavailableError) as caught:
        await door.enter(door.token())
    assert caught.value.reason == "jwks_unavailable"
    door.issuer.broken = False
    door.clock.advance(MIN_FETCH_PERIOD_S)
    await door.enter(door.token())
    door.issuer.broken = True
    door.clock.advance(MAX_STALE_S - 1)
    await door.enter(door.token())
    door.clock.advance(MIN_FETCH_PERIOD_S)
    with pytest.raises(KeysUnavailableError):
        await door.enter(door.token())
    assert ("token", "jwks_unavailable") in door.seen.outcomes
