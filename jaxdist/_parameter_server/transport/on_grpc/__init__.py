"""Messages by gRPC, whose deadlines, status codes, health service and TLS are used as they are."""

from jaxdist._parameter_server.transport.on_grpc.channel import GrpcChannel as GrpcChannel
from jaxdist._parameter_server.transport.on_grpc.listener import GrpcListener as GrpcListener
