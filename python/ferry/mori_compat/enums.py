"""Enums that behave as pybind11's do: one object for each member, no order, unequal to integers."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

_Member = TypeVar("_Member", bound="NativeEnum")
_BITS = 32


class NativeEnum:
    """An enum of a native module. A number without a name is allowed and called `???`."""

    __slots__ = ("_value",)

    __members__: ClassVar[dict[str, Any]]
    _by_value: ClassVar[dict[int, Any]]
    _value: int

    def __init_subclass__(cls, members: dict[str, int]) -> None:
        """Make the members of a class."""
        cls.__members__ = {}
        cls._by_value = {}
        for name, value in members.items():
            member = object.__new__(cls)
            member._value = value
            cls.__members__[name] = cls._by_value[value] = member
            setattr(cls, name, member)

    def __new__(cls: type[_Member], value: int) -> _Member:
        """Return the member of a number."""
        if not isinstance(value, int):
            raise TypeError(f"{cls.__name__}() needs an integer, not {type(value).__name__}")
        if not 0 <= value < 1 << _BITS:
            raise TypeError(f"{cls.__name__}() needs an integer of {_BITS} bits, not {value}")
        known = cls._by_value.get(value)
        if known is not None:
            return known
        member = object.__new__(cls)
        member._value = int(value)
        return member

    @property
    def value(self) -> int:
        """The number."""
        return self._value

    @property
    def name(self) -> str:
        """The name; `???` if the number has none."""
        names = (name for name, member in self.__members__.items() if member._value == self._value)
        return next(names, "???")

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    def __hash__(self) -> int:
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._value == other._value  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self._value,)


class BackendType(NativeEnum, members={"Unknown": 0, "XGMI": 1, "RDMA": 2, "TCP": 3, "FABRIC": 4}):
    """What a backend is called. It does not decide how bytes move here."""

    Unknown: ClassVar[BackendType]
    XGMI: ClassVar[BackendType]
    RDMA: ClassVar[BackendType]
    TCP: ClassVar[BackendType]
    FABRIC: ClassVar[BackendType]


class MemoryLocationType(NativeEnum, members={"Unknown": 0, "CPU": 1, "GPU": 2}):
    """Where memory is, as its owner says."""

    Unknown: ClassVar[MemoryLocationType]
    CPU: ClassVar[MemoryLocationType]
    GPU: ClassVar[MemoryLocationType]


class StatusCode(
    NativeEnum,
    members={
        "SUCCESS": 0,
        "INIT": 1,
        "IN_PROGRESS": 2,
        "ERR_INVALID_ARGS": 11,
        "ERR_NOT_FOUND": 12,
        "ERR_RDMA_OP": 13,
        "ERR_BAD_STATE": 14,
        "ERR_GPU_OP": 15,
    },
):
    """What became of a transfer."""

    SUCCESS: ClassVar[StatusCode]
    INIT: ClassVar[StatusCode]
    IN_PROGRESS: ClassVar[StatusCode]
    ERR_INVALID_ARGS: ClassVar[StatusCode]
    ERR_NOT_FOUND: ClassVar[StatusCode]
    ERR_RDMA_OP: ClassVar[StatusCode]
    ERR_BAD_STATE: ClassVar[StatusCode]
    ERR_GPU_OP: ClassVar[StatusCode]


class PollCqMode(NativeEnum, members={"POLLING": 0, "EVENT": 1}):
    """How the original waits for its network card. It changes nothing here."""

    POLLING: ClassVar[PollCqMode]
    EVENT: ClassVar[PollCqMode]


class PeerFailureReason(
    NativeEnum,
    members={
        "UNKNOWN": 0,
        "PEER_UNREACHABLE": 1,
        "LOCAL_QP_ERROR": 2,
        "LOCAL_PORT_DOWN": 3,
        "LOCAL_DEVICE_FATAL": 4,
        "LOCAL_CQ_ERROR": 5,
    },
):
    """Why a peer failed."""

    UNKNOWN: ClassVar[PeerFailureReason]
    PEER_UNREACHABLE: ClassVar[PeerFailureReason]
    LOCAL_QP_ERROR: ClassVar[PeerFailureReason]
    LOCAL_PORT_DOWN: ClassVar[PeerFailureReason]
    LOCAL_DEVICE_FATAL: ClassVar[PeerFailureReason]
    LOCAL_CQ_ERROR: ClassVar[PeerFailureReason]
