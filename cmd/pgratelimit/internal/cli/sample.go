package cli

import (
	"context"
	_ "embed"
	"math"
)

//go:embed sql/sizes.sql
var sizesSQL string

const (
	// BlockSize is the block size of almost every Postgres, in bytes. If a Postgres has another block size, its samples
	// are larger or smaller.
	BlockSize = 8192

	// SampleBlocks is the largest number of blocks that a sample reads: 100 MB.
	SampleBlocks = 12_800
)

// TableSize is a table's size on disk.
type TableSize struct {
	Table      string `json:"table"`
	TableBytes int64  `json:"table_bytes"`
	TotalBytes int64  `json:"total_bytes"` // the size including the index
}

// TableSizes returns the size of each table, and the percentage of the table that a sample should read. The percentage
// is 100 for a small table, or if exact is true.
func TableSizes(ctx context.Context, tx Tx, exact bool) ([]TableSize, map[string]float64, error) {
	sizes, err := Rows[TableSize](ctx, tx, sizesSQL)
	percent := map[string]float64{}
	for _, s := range sizes {
		percent[s.Table] = 100
		if !exact {
			percent[s.Table] = 100 * SampleShare(s.TableBytes)
		}
	}
	return sizes, percent, err
}

func AddSizes(all, more []TableSize) []TableSize {
	if all == nil {
		return more
	}
	for i := range more {
		all[i].TableBytes += more[i].TableBytes
		all[i].TotalBytes += more[i].TotalBytes
	}
	return all
}

// SampleShare returns the share of a table that a sample reads, from 0 to 1.
func SampleShare(bytes int64) float64 {
	return min(1, SampleBlocks*BlockSize/math.Max(float64(bytes), 1))
}
