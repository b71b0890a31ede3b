"""S3 through private parts of s3fs."""

from __future__ import annotations

from typing import Any

from kerasmem.compat.borrowing import Borrowed, NotAvailableError

_URLS = "reading s3:// URLs"
CALL_S3 = Borrowed("s3fs:S3FileSystem._call_s3(method)", feature=_URLS)
SEND = Borrowed("aiobotocore.httpsession:AIOHTTPSession.send(request)", feature=_URLS)
_loaders: dict[Any, Any] = {}  # by the folders they look into: what botocore has read of S3's description


def is_s3(system: Any) -> bool:
    """Return whether a file system is s3fs's, or one that speaks as it does."""
    return hasattr(system, "_call_s3")


def share_description(system: Any) -> None:
    """Have a file system take botocore's description of S3 from the one before it.

    Each would read and parse its own otherwise, which takes a tenth of a second of processor time.
    """
    from aiobotocore.session import AioSession

    if system.session is None:
        session = AioSession(**system.kwargs)
        where = session.get_config_variable("data_path")
        session.register_component("data_loader", _loaders.setdefault(where, session.get_component("data_loader")))
        system.session = session


async def get_s3_object(system: Any, **settings: Any) -> Any:
    """Return S3's answer to GetObject, its ETag and its body among it."""
    CALL_S3.get()
    return await system._call_s3("get_object", **settings)


def takes_signed_links(system: Any) -> bool:
    """Return whether links can be asked for, and all that a file system adds to a request be in them: nothing."""
    try:
        SEND.get()
    except NotAvailableError:
        return False
    return not (system.req_kw or system.s3_additional_kwargs)


async def sign_s3_link(system: Any, names: dict[str, str], seconds: int) -> str:
    """Return a link to an object that is valid for some seconds, signed with the file system's credentials.

    Raises:
        AttributeError: If this version of botocore has no connections that it could be asked for over.
    """
    await system.set_session()
    client = await system.get_s3(names["Bucket"])
    _connections(client)
    client.meta.events.register_first("choose-signer.s3.GetObject", _keep_version_4, unique_id="kerasmem-signer")
    return str(await client.generate_presigned_url("get_object", Params=names, ExpiresIn=seconds))


async def get_signed(system: Any, bucket: str, link: str, headers: dict[str, str]) -> Any:
    """Return the answer to a signed link, asked for over the connections of the file system's own client."""
    from botocore.awsrequest import AWSPreparedRequest

    connections = _connections(await system.get_s3(bucket))
    return await connections.send(AWSPreparedRequest("GET", link, headers, None, True))


def _connections(client: Any) -> Any:
    return client._endpoint.http_session


def _keep_version_4(signature_version: Any, **_: Any) -> str | None:
    """Keep signatures of version 4, as botocore signs links by version 2."""
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None
