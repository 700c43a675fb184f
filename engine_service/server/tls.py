"""TLS on the engine's socket: the certificate and key of the settings, and every mistake in them by its name.

Decides that TLS 1.2 is the oldest spoken. Knows nothing of requests. Source: docs/configuration.md.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from engine_service.errors import SettingsError
from engine_service.settings import ServerSettings

_CERTIFICATE = ("tls_certificate", b"CERTIFICATE-----", "certificate")
_KEY = ("tls_key", b"PRIVATE KEY-----", "private key")


def server_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return what the engine serves TLS with, None without a certificate; raise SettingsError."""
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, settings.tls_certificate, settings.tls_key)
    return context


def renew(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """Serve new connections with what the files hold now; raise SettingsError and change nothing if wrong."""
    if settings.tls_certificate is not None:
        server_context(settings)  # a bad pair must not get into the context in use
        _load(context, settings.tls_certificate, settings.tls_key)


def own_client_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return what a program on this machine trusts: the engine's own certificate, whatever name it bears."""
    if settings.tls_certificate is None:
        return None
    _read(settings.tls_certificate, *_CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(settings.tls_certificate)
    except ssl.SSLError:
        raise SettingsError(f"server.tls_certificate: {settings.tls_certificate} is damaged") from None
    return context


def _load(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    key = key or certificate
    _read(certificate, *_CERTIFICATE)
    _read(key, *_KEY)
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_encrypted(key))
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise SettingsError(
                f"server.tls_key: {key} is not the key of the certificate in {certificate}; "
                "name the one it was made with"
            ) from None
        raise SettingsError(
            f"server.tls_certificate: {certificate} with the key {key} cannot be used: "
            f"{error.reason or error}"
        ) from None


def _read(path: Path, setting: str, mark: bytes, what: str) -> None:
    """Raise SettingsError unless the file can be read and holds what it should."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"server.{setting}: {path} cannot be read: {error.strerror}") from None
    if mark not in content:
        raise SettingsError(f"server.{setting}: {path} holds no {what} in PEM form (BEGIN … {what.upper()})")


def _refuse_encrypted(key: Path) -> NoReturn:
    raise SettingsError(
        f"server.tls_key: {key} is encrypted, and nobody is there to type its password; "
        "write it without one, readable by the engine's user only"
    )
