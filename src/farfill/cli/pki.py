"""`farfill pki init`: a CA of its own, a certificate for each role of a cluster file, and the ticket key pair.

Made for trying out and for small deployments; a larger one brings certificates from its own CA. Each
certificate names its role as `farfill://<cluster>/<site>/<role>/<name>` and the hosts it is reached at.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farfill.config.checks import split_address
from farfill.config.load import LoadedConfig, load_config
from farfill.config.model import ClusterConfig
from farfill.core.errors import ConfigError
from farfill.transport.tls import PeerIdentity

CA_LIFETIME_FACTOR = 2
# Certificates are valid a little before they were made: the other site's clock may be behind.
BACKDATE = datetime.timedelta(minutes=10)

app = typer.Typer(no_args_is_help=True, help="Certificates for trying out and for small deployments.")


@dataclass(frozen=True, slots=True)
class Member:
    """One role that needs a certificate. `hosts` are names or addresses others reach it at."""

    identity: PeerIdentity
    hosts: tuple[str, ...]


@app.command("init")
def init(
    directory: Annotated[
        Path | None, typer.Argument(help="Folder to make; must not hold a CA yet.", show_default="that of tls.ca")
    ] = None,
    config: Annotated[Path, typer.Option(help="Cluster file whose roles get certificates.")] = Path("cluster.yaml"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a CA, a certificate for each role of the cluster file, and the ticket key pair."""
    loaded = load_config(config)
    members = members_of(loaded.config)
    directory = directory if directory is not None else _folder_of_ca(loaded)
    create_pki(directory, members, days=days)
    unit = "day" if days == 1 else "days"
    typer.echo(f"{directory}: CA, ticket keys and {len(members)} certificates, valid for {days} {unit}")
    typer.echo(f"Keep {directory}/ca.key off the servers. A host needs ca.pem, its own NAME.pem and NAME.key,")
    typer.echo("and ticket.pub on workers or ticket.key on the gateway.")
    for key, reference, file in _astray(loaded, directory):
        typer.echo(f"Note: {key} is {reference}, but the file made for it is {file}.")


def _folder_of_ca(loaded: LoadedConfig) -> Path:
    reference = loaded.config.tls.ca
    if not reference.startswith("file:"):
        raise ConfigError(f"{loaded.path}: tls.ca is {reference}; say which folder to make")
    return (loaded.base_dir / reference.removeprefix("file:")).parent


def _astray(loaded: LoadedConfig, directory: Path) -> Iterator[tuple[str, str, Path]]:
    """(key, reference, file) of every reference of the cluster file that does not point to the file made for it."""
    tls, tickets = loaded.config.tls, loaded.config.tickets
    for key, reference, name in (
        ("tls.ca", tls.ca, "ca.pem"),
        ("tls.cert", tls.cert, "{name}.pem"),
        ("tls.key", tls.key, "{name}.key"),
        ("tickets.signing_key", tickets.signing_key, "ticket.key"),
        ("tickets.public_key", tickets.public_key, "ticket.pub"),
    ):
        made = directory.absolute() / name
        if not reference.startswith("file:") or loaded.base_dir / reference.removeprefix("file:") != made:
            yield key, reference, made


def members_of(config: ClusterConfig) -> list[Member]:
    """Every role of the cluster file. A wildcard address names no host."""
    registry = config.registry
    members = [
        _member(config, config.gateway.site, "gateway", "gateway", [config.gateway.listen]),
        _member(config, registry.site, "registry", "registry", [registry.advertise or registry.listen]),
    ]
    for name, worker in config.workers.items():
        addresses = [worker.advertise or worker.listen, worker.transfer_advertise or worker.transfer_listen]
        members.append(_member(config, worker.site, str(worker.role), name, addresses))
    return members


def create_pki(directory: Path, members: Sequence[Member], *, days: int) -> None:
    """Write ca.pem, ca.key, NAME.pem and NAME.key per member, ticket.key and ticket.pub.

    Keys are readable by the owner only. Raises ConfigError when there is a CA already, or on a write error.
    """
    if (directory / "ca.pem").exists():
        raise ConfigError(f"{directory} holds a CA already; choose another folder, or remove it first")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_all(directory, members, days)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be written: {error.strerror}") from error


def _write_all(directory: Path, members: Sequence[Member], days: int) -> None:
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _ca_certificate(ca_key, days * CA_LIFETIME_FACTOR)
    _write(directory / "ca.key", _private_pem(ca_key), private=True)
    _write(directory / "ca.pem", ca.public_bytes(Encoding.PEM))
    for member in members:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _leaf_certificate(member, key.public_key(), ca, ca_key, days)
        _write(directory / f"{member.identity.name}.key", _private_pem(key), private=True)
        _write(directory / f"{member.identity.name}.pem", certificate.public_bytes(Encoding.PEM))
    ticket_key = ed25519.Ed25519PrivateKey.generate()
    public = ticket_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _write(directory / "ticket.key", _private_pem(ticket_key), private=True)
    _write(directory / "ticket.pub", public)


def _member(config: ClusterConfig, site: str, role: str, name: str, addresses: Sequence[str | None]) -> Member:
    hosts = [split_address(address)[0] for address in addresses if address is not None]
    return Member(PeerIdentity(config.cluster, site, role, name), tuple(dict.fromkeys(hosts)))


def _ca_certificate(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Farfill CA")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf_certificate(
    member: Member,
    public_key: ec.EllipticCurvePublicKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, member.identity.name)])
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(member.identity.uri)]
    names += [general for host in member.hosts if (general := _host_name(host)) is not None]
    both_ways = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _builder(name, ca.subject, public_key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both_ways), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host_name(host: str) -> x509.GeneralName | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return x509.DNSName(host)
    return None if address.is_unspecified else x509.IPAddress(address)


def _private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
