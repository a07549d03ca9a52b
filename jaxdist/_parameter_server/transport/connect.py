"""`serve` and `connect`: the two ends of a connection, in one process or by gRPC."""

from collections.abc import Mapping, Sequence

from jaxdist._called import called, refuse
from jaxdist._parameter_server.transport.grpc_channel import GrpcChannel
from jaxdist._parameter_server.transport.grpc_listener import GrpcListener
from jaxdist._parameter_server.transport.limits import DEFAULT, Limits
from jaxdist._parameter_server.transport.local import LocalChannel, LocalListener
from jaxdist._parameter_server.transport.message import Channel, Handler, Listener
from jaxdist._parameter_server.transport.moving import MovingChannel, find_addresses
from jaxdist._parameter_server.transport.security import Security, read_security
from jaxdist._processes import describe_addresses, format_address, parse_address
from jaxdist._validate import check_text, show

LAYERS = ("grpc", "local")


@called("serve")
def serve(
    address: str,
    handlers: Mapping[str, Handler],
    *,
    layer: str,
    security: Security | None = None,
    limits: Limits = DEFAULT,
) -> Listener:
    """Answer calls at an address.

    Args:
        address: Host and port, such as `127.0.0.1:2222`. Without a host it is 127.0.0.1, and port
            0 is a free port.
        handlers: A function for each method, from the request to the reply. They are called in
            threads, several at a time.
        layer: `"grpc"`, or `"local"` for callers of this process.
        security: Who may call; None means what the environment says.
        limits: The largest messages, and how many calls, it accepts.

    Returns:
        The listener. It answers until `stop`, or until the process ends.

    Raises:
        ArgumentError: The address is not valid.
        ClusterError: The address is in use.
        UnauthenticatedError: Other machines reach the address, and there is no TLS and no secret.
        MissingExtraError: `"grpc"`, and grpcio is not installed.

    Example:
        >>> from jaxdist._parameter_server.transport import Message, connect, serve
        >>> add = lambda request: Message("add", {}, (request.arrays[0] + 1,))
        >>> listener = serve("127.0.0.1:0", {"add": add}, layer="local")
        >>> channel = connect(listener.address, layer="local", name="ps 0")
        >>> channel.call(Message("add", {}, (np.arange(3),))).arrays
        (array([1, 2, 3]),)
        >>> listener.stop()
    """
    host, port = split_address(address)
    if layer == "local":
        return LocalListener(format_address(host, port), handlers, limits)
    addresses = find_addresses()
    if addresses is not None:
        host, port = split_address(addresses.find(format_address(host, port)))
    return GrpcListener(host, port, handlers, limits, security or read_security())


@called("connect")
def connect(
    address: str,
    *,
    layer: str,
    name: str = "",
    security: Security | None = None,
    limits: Limits = DEFAULT,
) -> Channel:
    """Return a channel to a task, which need not listen yet.

    Args:
        address: Where the task listens.
        layer: `"grpc"`, or `"local"` for a task of this process.
        name: The task in errors, such as `ps 0`.
        security: The secret and certificates for the task; None means those of the environment.
        limits: The largest messages.

    Returns:
        The channel. It connects when it is used, and again after the task was started again.

    Raises:
        ArgumentError: The address is not valid.
        MissingExtraError: `"grpc"`, and grpcio is not installed.
    """
    address = format_address(*split_address(address, lowest=1))
    if layer == "local":
        return LocalChannel(address, name, limits)
    found = security or read_security()
    addresses = find_addresses()
    if addresses is None:
        return GrpcChannel(address, name, limits, found)
    return MovingChannel(address, addresses, lambda now: GrpcChannel(now, name, limits, found))


def check_layer(layer: str) -> None:
    """Raise `ArgumentError` if a layer is not valid."""
    # An array has no truth value when it is compared.
    if not isinstance(layer, str) or layer not in LAYERS:
        raise refuse(
            f"rpc_layer={show(layer)}.",
            f"A layer is one of {list(LAYERS)}.",
            "Pass rpc_layer='grpc' for tasks in several processes, or 'local' for tasks in one.",
        )


def split_address(address: str, lowest: int = 0) -> tuple[str, int]:
    """Return the host and the port of an address.

    Raises:
        ArgumentError: It is not valid.
    """
    check_text("address", address, "127.0.0.1:2222")
    found = parse_address(f"127.0.0.1{address}" if address.startswith(":") else address, lowest)
    if found is None:
        raise refuse(
            f"address={show(address)}.",
            describe_addresses(lowest),
            "Pass for instance address='127.0.0.1:2222' or '[::1]:2222'.",
        )
    return found


def check_addresses(tasks: Mapping[str, Sequence[str | None]], lowest: int = 1) -> None:
    """Check the addresses of tasks, so that a wrong one is not waited for.

    Args:
        tasks: The addresses of each job.
        lowest: The lowest port.

    Raises:
        ArgumentError: One of them is not an address.
    """
    for job, addresses in tasks.items():
        for number, address in enumerate(addresses):
            if address is not None and parse_address(address, lowest) is None:
                raise refuse(
                    f"the address {address!r} of {job} {number}.",
                    describe_addresses(lowest),
                    "Write for instance 'host0.example.com:2222' or '[::1]:2222'.",
                )
