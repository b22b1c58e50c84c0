// The device guard: devices, streams that are OpenCL's queues, and events that are marks in them.
#pragma once

#include "runtime.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace bfc_opencl {

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }

    c10::DeviceIndex deviceCount() const noexcept override { return device_count; }

    c10::Device getDevice() const override { return {kType, current_device}; }

    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }

    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() >= 0, "which device? ", device, " is none");
        current_device = static_cast<c10::DeviceIndex>(index_of(device));
    }

    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0 && device.index() < device_count) current_device = device.index();
    }

    // A stream's id is the handle of its queue; 0 is the device's own queue.

    c10::Stream getStream(c10::Device device) const override {
        return stream(device, current_streams[index_of(device)]);
    }

    c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }

    c10::Stream getNewStream(c10::Device device, int priority) const override {
        (void)priority;     // OpenCL has none
        return stream(device, ask_for<c10::StreamId>("new_stream", index_of(device)));
    }

    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }

    c10::Stream exchangeStream(c10::Stream next) const override {
        c10::StreamId& current = current_streams[index_of(next.device())];
        const c10::Stream before = stream(next.device(), current);
        current = next.id();
        return before;
    }

    void* getStreamNativeHandle(const c10::Stream stream) const {
        return reinterpret_cast<void*>(ask_for<uintptr_t>("handle_of", index_of(stream.device()), stream.id()));
    }

    bool queryStream(const c10::Stream& stream) const override {
        return ask_for<bool>("is_idle", index_of(stream.device()), stream.id());
    }

    void synchronizeStream(const c10::Stream& stream) const override {
        tell("finish_stream", index_of(stream.device()), stream.id());
    }

    void synchronizeDevice(const c10::DeviceIndex device) const override { tell("finish", static_cast<int>(device)); }

    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        allocator.recordStream(data, stream);
    }

    // An event is a `Mark` of the runtime: a new one each time that it is recorded.

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        const Gil gil;
        py::object mark = ask("record", index_of(stream.device()), stream.id());
        Py_XDECREF(static_cast<PyObject*>(*event));
        *event = mark.release().ptr();
    }

    void block(void* event, const c10::Stream& stream) const override {
        if (event != nullptr) tell("block", mark_of(event), index_of(stream.device()), stream.id());
    }

    bool queryEvent(void* event) const override {
        return event == nullptr || ask_for<bool>("is_done", mark_of(event));
    }

    void synchronizeEvent(void* event) const override {
        if (event != nullptr) tell("wait", mark_of(event));
    }

    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        return ask_for<double>("elapsed", mark_of(first), mark_of(second));
    }

    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        if (event == nullptr || python_is_gone()) return;
        const Gil gil;
        const py::error_scope aside;
        Py_DECREF(static_cast<PyObject*>(event));
    }

private:
    static int index_of(c10::Device device) {
        TORCH_CHECK(device.index() < device_count, "there is no device ", device,
                    ": bfc.integrations.torch_opencl.enable() has found ", static_cast<int>(device_count),
                    ", counted from 0");
        return device.index() < 0 ? current_device : device.index();
    }

    static c10::Stream stream(c10::Device device, c10::StreamId id) {
        const auto index = static_cast<c10::DeviceIndex>(index_of(device));
        return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
    }

    static py::handle mark_of(void* event) { return {static_cast<PyObject*>(event)}; }
};

}  // namespace bfc_opencl
