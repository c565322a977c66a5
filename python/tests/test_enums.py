"""Enums behave as the original's native ones."""

import pickle

import pytest

from ferry.mori_compat import cpp, io
from ferry.mori_compat.enums import (
    BackendType,
    MemoryLocationType,
    PeerFailureReason,
    PollCqMode,
    StatusCode,
)

MEMBERS = {
    BackendType: {"Unknown": 0, "XGMI": 1, "RDMA": 2, "TCP": 3, "FABRIC": 4},
    MemoryLocationType: {"Unknown": 0, "CPU": 1, "GPU": 2},
    StatusCode: {
        "SUCCESS": 0,
        "INIT": 1,
        "IN_PROGRESS": 2,
        "ERR_INVALID_ARGS": 11,
        "ERR_NOT_FOUND": 12,
        "ERR_RDMA_OP": 13,
        "ERR_BAD_STATE": 14,
        "ERR_GPU_OP": 15,
    },
    PollCqMode: {"POLLING": 0, "EVENT": 1},
    PeerFailureReason: {
        "UNKNOWN": 0,
        "PEER_UNREACHABLE": 1,
        "LOCAL_QP_ERROR": 2,
        "LOCAL_PORT_DOWN": 3,
        "LOCAL_DEVICE_FATAL": 4,
        "LOCAL_CQ_ERROR": 5,
    },
}


@pytest.mark.parametrize("enum", MEMBERS, ids=lambda enum: enum.__name__)
def test_members_have_their_numbers_and_are_single_objects(enum):
    assert {name: member.value for name, member in enum.__members__.items()} == MEMBERS[enum]
    for name, value in MEMBERS[enum].items():
        member = getattr(enum, name)
        assert enum(value) is member
        assert (member.name, int(member), hash(member)) == (name, value, value)
        assert repr(member) == f"<{enum.__name__}.{name}: {value}>"
        assert str(member) == f"{enum.__name__}.{name}"
        assert pickle.loads(pickle.dumps(member)) is member


def test_a_member_equals_only_members_of_its_own_enum():
    assert StatusCode.INIT != 1
    assert StatusCode.SUCCESS != 0
    assert StatusCode.INIT != BackendType.XGMI
    assert StatusCode(11) == StatusCode.ERR_INVALID_ARGS
    with pytest.raises(TypeError):
        _ = StatusCode.SUCCESS < StatusCode.INIT


def test_numbers_without_a_name_are_allowed_and_other_things_are_not():
    assert repr(StatusCode(99)) == "<StatusCode.???: 99>"
    assert StatusCode(99) == StatusCode(99)
    for wrong in ("SUCCESS", None, 1.0, -1, 1 << 32):
        with pytest.raises(TypeError):
            StatusCode(wrong)


def test_names_are_exported_where_the_original_has_them():
    assert cpp.SUCCESS is StatusCode.SUCCESS
    assert cpp.RDMA is BackendType.RDMA
    assert cpp.CPU is MemoryLocationType.CPU
    assert cpp.Unknown is MemoryLocationType.Unknown
    assert not hasattr(cpp, "POLLING")
    assert io.StatusCode is cpp.StatusCode
    for name in ("fabric_alloc", "fabric_free", "make_fabric_mem_pool"):
        with pytest.raises(RuntimeError, match="fabric memory"):
            getattr(io, name)()


def test_configurations_have_the_original_defaults_and_types():
    config = io.RdmaBackendConfig(4, -1, 4, PollCqMode.EVENT, False)
    assert (config.qp_per_transfer, config.num_worker_threads) == (4, 4)
    assert config.poll_cq_mode is PollCqMode.EVENT
    assert (config.enable_notification, config.notif_per_qp) == (False, 1024)
    assert (config.enable_transfer_chunking, config.chunk_bytes) == (False, 65536)
    assert (config.max_chunks_per_transfer, config.num_nics_per_transfer) == (64, 1)
    assert (config.max_send_wr, config.max_cqe_num, config.max_msg_sge) == (0, 0, 0)
    config.qp_per_transfer = 2
    assert config.qp_per_transfer == 2
    assert isinstance(config, cpp.BackendConfig)
    assert (io.XgmiBackendConfig().num_streams, io.FabricBackendConfig().num_events) == (64, 64)
    where = io.IOEngineConfig()
    assert (where.host, where.port) == ("", 0)
    for name, wrong in (("port", 65536), ("port", -1), ("port", "1"), ("host", 1)):
        with pytest.raises(TypeError):
            setattr(where, name, wrong)
    with pytest.raises(AttributeError):
        where.prot = 1
    with pytest.raises(TypeError):
        cpp.BackendConfig()
