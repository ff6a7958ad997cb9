"""Makes keys and certificates: an authority, a server's, and one per role.

Used by `credentials`, and the only importer of cryptography. It writes no files and reads no clock.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jigsawrl.bus.server_config import SERVER_USER

CLOCK_SKEW = timedelta(minutes=5)
"""A certificate is valid from a little earlier on: machines' clocks differ."""


class Pair(NamedTuple):
    """A private key and its certificate, both PEM."""

    key: str
    certificate: str


def valid_until(certificate: str) -> datetime:
    """The end of a certificate; raises ValueError for what is none."""
    return x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc


class Authority:
    """Signs certificates."""

    def __init__(self, pair: Pair) -> None:
        """Raises ValueError for what is no such pair."""
        key = load_pem_private_key(pair.key.encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the authority's key is not of the kind that jigsaw credentials makes")
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(pair.certificate.encode())
        self.pair = pair

    @property
    def valid_until(self) -> datetime:
        """Nothing that it signs is valid for longer."""
        return self._certificate.not_valid_after_utc

    def for_server(self, hosts: Sequence[str], *, now: datetime, valid_until: datetime) -> Pair:
        """A server's: it serves at `hosts`, and meets the other servers of its cluster with it."""
        names = [_host(host) for host in hosts]
        return self._issue(
            "NATS",
            [x509.RFC822Name(SERVER_USER), *names],
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH],
            now=now,
            valid_until=valid_until,
        )

    def for_user(self, user: str, *, now: datetime, valid_until: datetime) -> Pair:
        """A client's, whose name is the server's user."""
        return self._issue(
            user,
            [x509.RFC822Name(user)],
            [ExtendedKeyUsageOID.CLIENT_AUTH],
            now=now,
            valid_until=valid_until,
        )

    def _issue(
        self,
        name: str,
        alternatives: Iterable[x509.GeneralName],
        usages: Iterable[x509.ObjectIdentifier],
        *,
        now: datetime,
        valid_until: datetime,
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(name, key, now=now, valid_until=valid_until)
            .issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return _pair(key, certificate)


def make_authority(*, now: datetime, valid_until: datetime) -> Authority:
    """A new one, that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("JigsawRL", key, now=now, valid_until=valid_until)
    certificate = (
        builder.issuer_name(_name("JigsawRL"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(_pair(key, certificate))


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, *, now: datetime, valid_until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, valid_until) - CLOCK_SKEW)
        .not_valid_after(valid_until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Pair:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(private.decode(), certificate.public_bytes(Encoding.PEM).decode())
