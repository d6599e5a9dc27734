package envoy

import (
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// metadataOf returns the request in the reference's form, with the metadata of the rules that have room.
func metadataOf(request *pb.RateLimitRequest, passed []*match) *structpb.Struct {
	descriptors := &structpb.ListValue{}
	for _, d := range request.GetDescriptors() {
		entries := &structpb.ListValue{}
		for _, e := range d.GetEntries() {
			entries.Values = append(entries.Values, structpb.NewStringValue(e.GetKey()+"="+e.GetValue()))
		}
		fields := map[string]*structpb.Value{"entries": structpb.NewListValue(entries)}
		if own := d.GetLimit(); own != nil {
			fields["limit"] = structpb.NewStringValue(own.String())
		}
		if hits := d.GetHitsAddend(); hits != nil {
			fields["hitsAddend"] = structpb.NewNumberValue(float64(hits.GetValue()))
		}
		descriptors.Values = append(descriptors.Values, structpb.NewStructValue(&structpb.Struct{Fields: fields}))
	}
	fields := map[string]*structpb.Value{
		"domain":      structpb.NewStringValue(request.GetDomain()),
		"descriptors": structpb.NewListValue(descriptors),
	}
	if hits := request.GetHitsAddend(); hits != 0 {
		fields["hitsAddend"] = structpb.NewNumberValue(float64(hits))
	}
	all := &structpb.Struct{Fields: map[string]*structpb.Value{}}
	for _, m := range passed {
		merge(all, m.limit.metadata)
	}
	if len(all.GetFields()) > 0 {
		fields["metadata"] = structpb.NewStructValue(all)
	}
	return &structpb.Struct{Fields: fields}
}

// merge adds the fields of from. Where both have a value, that of to stays, except that two structs are merged.
func merge(to, from *structpb.Struct) {
	for name, value := range from.GetFields() {
		have, both := to.GetFields()[name]
		switch {
		case !both:
			to.Fields[name] = proto.CloneOf(value) // because a later merge may change it
		case have.GetStructValue() != nil && value.GetStructValue() != nil:
			merge(have.GetStructValue(), value.GetStructValue())
		}
	}
}
